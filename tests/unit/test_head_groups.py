"""Heads are collected tile by tile, held by groups and let go of."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, nn

from trl_budget.attention import AttentionCall
from trl_budget.head_groups import HeadGroups


def returned_query(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None) -> Tensor:
    assert key.shape[1] == value.shape[1] == query.shape[1] // 2
    return (query + 0 * torch.cat([key, value], dim=1)).transpose(1, 2)


def tile(query: Tensor, start: int, stop: int) -> AttentionCall:
    key = torch.zeros(query.shape[0], query.shape[1] // 2, stop - start, query.shape[3])
    return AttentionCall(returned_query, nn.Identity(), query[:, :, start:stop].clone(), key, key.clone(), None, {})


def collected(query: Tensor, num_groups: int, *, is_apart: bool = True) -> HeadGroups:
    heads = HeadGroups(query.shape[2], num_groups, is_apart=is_apart)
    for start, stop in ((0, 3), (3, 4), (4, 7)):
        heads.collect(tile(query, start, stop), start)
    return heads


def test_each_group_has_its_heads_of_every_token() -> None:
    query = torch.randn(2, 8, 7, 3)
    for outputs in (
        collected(query, 2).attend(),
        [graph.output for graph in collected(query, 2).attend_with_graph()],
    ):
        first, second = outputs
        assert torch.equal(first, query[:, :4].transpose(1, 2))
        assert torch.equal(second, query[:, 4:].transpose(1, 2))


def test_heads_that_are_not_apart_are_attended_together() -> None:
    query = torch.randn(2, 8, 7, 3)
    (output,) = collected(query, 2, is_apart=False).attend()
    assert torch.equal(output, query.transpose(1, 2))


def test_a_groups_gradients_are_those_of_its_heads() -> None:
    graph = collected(torch.randn(1, 8, 7, 3), 4).attend_with_graph()[1]
    gradient = torch.randn(1, 7, 2, 3)
    query, key, value = graph.gradients(gradient)
    assert torch.equal(query, gradient.transpose(1, 2))
    assert key.abs().max() == value.abs().max() == 0.0


def test_a_tiles_tensors_are_copied_and_not_held() -> None:
    heads, call = HeadGroups(7, 2), tile(torch.randn(1, 8, 7, 3), 0, 7)
    watched = [weakref.ref(tensor) for tensor in (call.query, call.key, call.value)]
    heads.collect(call, 0)
    del call
    assert [watch() for watch in watched] == [None, None, None]
