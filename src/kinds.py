"""Kinds of models by what they read, and the model names that an experiment can use for each."""

DECODER, CROSS_ATTENTION, ENCODER_DECODER, FUSION_IN_DECODER = "decoder", "cross_attention", "encoder_decoder", "fusion_in_decoder"
VISION_LANGUAGE, REWARD = "vision_language", "reward"
KINDS = {
    DECODER: "a decoder, such as 'hf' or 'gpt_bigcode'",
    CROSS_ATTENTION: "'cross_attention' around a decoder",
    ENCODER_DECODER: "an encoder-decoder, such as 't5'",
    FUSION_IN_DECODER: "'fusion_in_decoder' around an encoder-decoder",
    REWARD: "'reward' around a decoder",
    VISION_LANGUAGE: "a decoder that reads images, such as 'vision_language'",
}
