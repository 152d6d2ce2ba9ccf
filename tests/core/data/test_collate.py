"""Padding: exact small lists, masks included."""

import torch

from src.data.collate import pad_chunks, pad_tokens, seq2seq


def test_right_padding_masks_come_from_lengths_even_where_the_pad_id_is_a_real_token():
    batch = pad_tokens([[5, 0], [6, 7, 0]], [[False, True], [False, False, True]], pad_id=0)
    assert batch["input_ids"].tolist() == [[5, 0, 0], [6, 7, 0]]
    assert batch["attention_mask"].tolist() == [[True, True, False], [True, True, True]]
    assert batch["loss_mask"].tolist() == [[False, True, False], [False, False, True]]
    assert batch["input_ids"].dtype == torch.int64
    assert batch["attention_mask"].dtype == batch["loss_mask"].dtype == torch.bool


def test_left_padding_ends_every_sequence_at_the_same_place():
    batch = pad_tokens([[5], [6, 7, 8]], [[True], [False, False, True]], pad_id=9, pad_left=True)
    assert batch["input_ids"].tolist() == [[9, 9, 5], [6, 7, 8]]
    assert batch["attention_mask"].tolist() == [[False, False, True], [True, True, True]]
    assert batch["loss_mask"].tolist() == [[False, False, True], [False, False, True]]


def test_pad_to_length_longer_than_all_sequences():
    batch = pad_tokens([[5], [6, 7]], [[False], [False, True]], pad_id=9, length=4)
    assert batch["input_ids"].tolist() == [[5, 9, 9, 9], [6, 7, 9, 9]]
    assert batch["attention_mask"].tolist() == [[True, False, False, False], [True, True, False, False]]
    assert batch["loss_mask"].tolist() == [[False, False, False, False], [False, True, False, False]]


def test_chunks_stay_with_their_sample():
    ids, mask = pad_chunks([[[1], [2], [3]], [[7], [8, 9]]], pad_id=0)
    assert ids.tolist() == [[[1, 0], [2, 0], [3, 0]], [[7, 0], [8, 9], [0, 0]]]
    assert mask[0].tolist() == [[True, False]] * 3
    assert mask[1].tolist() == [[True, False], [True, True], [False, False]]


def test_one_chunk_each():
    ids, mask = pad_chunks([[[1, 2]], [[3]]], pad_id=4)
    assert ids.tolist() == [[[1, 2]], [[3, 4]]]
    assert mask.tolist() == [[[True, True]], [[True, False]]]


def test_seq2seq():
    batch = seq2seq([[5, 0, 6], [7]], [[8, 1], [9, 0, 1]], pad_id=0, start_id=3)
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "input_ids": [[5, 0, 6], [7, 0, 0]],
        "attention_mask": [[True, True, True], [True, False, False]],
        "decoder_input_ids": [[3, 8, 1], [3, 9, 0]],
        "labels": [[8, 1, -100], [9, 0, 1]],
        "loss_mask": [[True, True, False], [True, True, True]],
    }
    assert {name: tensor.dtype for name, tensor in batch.items() if "mask" not in name} == dict.fromkeys(
        ("input_ids", "decoder_input_ids", "labels"), torch.int64
    )


def test_seq2seq_shifts_right_and_pads_unlearned_labels():
    batch = seq2seq([[1], [1]], [[5, 6], [5, 6, 7, 8]], pad_id=0, start_id=0)
    assert batch["labels"][0].tolist() == [5, 6, -100, -100]
    assert batch["decoder_input_ids"][0].tolist() == [0, 5, 6, 0]
