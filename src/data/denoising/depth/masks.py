"""Attention of DEPTH: sentence tokens read and write sentences as wholes (Bamberger et al. 2024, arXiv 2405.07788).

Shapes: B samples, S tokens of the longest input, T of the longest target.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from src.batches import DepthBatch, Seq2SeqBatch
from src.data.collate import NOT_LEARNED


def with_masks(batch: Seq2SeqBatch, sentence_ids: Tensor) -> DepthBatch:
    """The batch with the attention masks of DEPTH. Each input is [<eosen> <sent_i> words]... <eosen> </s>; each target as well.

    A sentence token of the encoder sees its own sentence: itself, its words, and the <eosen> that ends it. All its other tokens see all
    tokens. A sentence token that the decoder reads sees itself, those before it, and of the encoder the sentence tokens; its other tokens
    see what they see in T5. Padding, whose states nothing reads, sees as other tokens do, so that no softmax is over nothing.

    sentence_ids: ids of <sent_0>, <sent_1>, ...; no text has them.
    """
    real_BS, real_BT = batch["attention_mask"], batch["loss_mask"]
    read_BS = torch.isin(batch["input_ids"], sentence_ids) & real_BS
    written_BT = torch.isin(batch["decoder_input_ids"], sentence_ids) & real_BT
    sentence_BS = read_BS.cumsum(1)
    sentence_BS.scatter_(1, real_BS.sum(1, keepdim=True) - 1, 0)  # the end token is of no sentence, as what stands before the first
    sentence_BS.masked_fill_(~real_BS, -1)
    S, T = real_BS.shape[1], real_BT.shape[1]
    encoder_BSS, cross_BTS = real_BS[:, None].repeat(1, S, 1), real_BS[:, None].repeat(1, T, 1)
    decoder_BTT = real_BT[:, None] & torch.ones(T, T, dtype=torch.bool).tril()
    b, s = read_BS.nonzero(as_tuple=True)  # few rows are other than T5's
    encoder_BSS[b, s] = sentence_BS[b] == sentence_BS[b, s, None]
    b, t = written_BT.nonzero(as_tuple=True)
    decoder_BTT[b, t] &= written_BT[b]
    cross_BTS[b, t] = read_BS[b]
    return {**batch, "encoder_mask": encoder_BSS, "decoder_mask": decoder_BTT, "cross_mask": cross_BTS}


def pad_to(batch: Seq2SeqBatch, inputs: int, targets: int, pad_id: int) -> Seq2SeqBatch:
    """The batch with inputs and targets of at least so many tokens."""

    def longer(tensor: Tensor, length: int, fill: int) -> Tensor:
        return F.pad(tensor, (0, max(0, length - tensor.shape[1])), value=fill)

    return {
        "input_ids": longer(batch["input_ids"], inputs, pad_id),
        "attention_mask": longer(batch["attention_mask"], inputs, 0),
        "decoder_input_ids": longer(batch["decoder_input_ids"], targets, pad_id),
        "labels": longer(batch["labels"], targets, NOT_LEARNED),
        "loss_mask": longer(batch["loss_mask"], targets, 0),
    }
