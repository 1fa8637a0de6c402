"""flash-attn's functions on packed sequences of several lengths, run by this library's attention.

Their alignment differs from bridge.flash_attention: causal masks and windows are bottom-right, so the last query has
the position of the last key.
"""

from typing import Any, Literal, NamedTuple, overload

import torch

from jax_kernels.bridge.interop import torch_internals
from jax_kernels.bridge.interop.arguments import dtensors
from jax_kernels.bridge.interop.arguments.plain_numbers import plain_of
from jax_kernels.bridge.jax_functions.argument_names import rename
from jax_kernels.bridge.ops.attention.attention_checks import check_tensor
from jax_kernels.bridge.ops.drop_in.flash_attn import Probabilities, attend, check_packed, options_of

__all__ = ["flash_attn_varlen_func", "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func"]


@overload
def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = ...,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: tuple[int, int] = ...,
    softcap: float = ...,
    alibi_slopes: torch.Tensor | None = ...,
    deterministic: bool = ...,
    return_attn_probs: Literal[False] = ...,
    block_table: torch.Tensor | None = ...,
) -> torch.Tensor: ...
@overload
def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = ...,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: tuple[int, int] = ...,
    softcap: float = ...,
    alibi_slopes: torch.Tensor | None = ...,
    deterministic: bool = ...,
    return_attn_probs: bool = ...,
    block_table: torch.Tensor | None = ...,
) -> Probabilities: ...
def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> Probabilities:
    """flash_attn.flash_attn_varlen_func by bridge.flash_attention: packed sequences of several lengths. Returns out.

    If both cu_seqlens are one tensor, or if the call has no causal, window or alibi_slopes, the packed sequences run in
    place, with segment_ids. Otherwise the alignment of queries and keys may differ from sequence to sequence: queries
    and keys are copied to a batch of max_seqlen_q queries and max_seqlen_k keys.

    Args:
      q: [total_q, H, D]; k: [total_k, Hkv, D]; v: [total_k, Hkv, D].
      cu_seqlens_q, cu_seqlens_k: int32 [B + 1]: the start of each sequence, then the end of the last.
      max_seqlen_q, max_seqlen_k: length of the longest sequence. With cu_seqlens on a GPU it is not checked, as in
        flash-attn: a smaller number gives wrong results.
      alibi_slopes: [H] or, with sequences copied to a batch, [B, H].
      return_attn_probs: return (out, lse float32 [H, total_q], None).
      Other arguments: as in flash_attn_func.

    Returns out [total_q, H, D]. Tokens outside of all sequences, and queries of a sequence without keys, get out 0 and
    lse -inf. There may be zero tokens and zero sequences.

    Raises NotImplementedError for dropout_p above 0 and for block_table (see bridge.decode_attention), ValueError for a
    max_seqlen below the longest sequence and for cu_seqlens that descend or exceed the tokens, both on a CPU, and the
    errors of bridge.flash_attention.
    """
    if dtensors.are_in(q, k, v):
        given = {"q": q, "k": k, "v": v, "alibi_slopes": alibi_slopes}
        named = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "block_table": block_table}
        named |= {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k, "dropout_p": dropout_p, "causal": causal}
        named |= {"softmax_scale": softmax_scale, "window_size": window_size, "softcap": softcap}
        return _varlen_on_shards(given, named | {"deterministic": deterministic}, return_attn_probs)
    options = options_of(dropout_p, softmax_scale, causal, window_size, softcap, deterministic)
    if block_table is not None:
        raise NotImplementedError("block_table: got one, want None; bridge.decode_attention takes block_tables")
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x, q)
        if x.ndim != 3:
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, want [tokens, heads, head_dim]")
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        check_tensor(name, x, q)
        if x.dtype != torch.int32 or x.ndim != 1 or x.shape != cu_seqlens_q.shape or not len(x):
            raise ValueError(f"{name}: got {x.dtype} {tuple(x.shape)}, want torch.int32 [sequences + 1]")
    max_seqlen_q = _checked_longest("q", cu_seqlens_q, max_seqlen_q, len(q))
    max_seqlen_k = _checked_longest("k", cu_seqlens_k, max_seqlen_k, len(k))
    if alibi_slopes is not None:
        check_tensor("alibi_slopes", alibi_slopes, q)
    if len(cu_seqlens_q) == 1:  # without sequences the slopes have no effect
        cu_seqlens_k, alibi_slopes = cu_seqlens_q, None
    is_aligned = cu_seqlens_q is cu_seqlens_k or not (causal or alibi_slopes is not None or options["window"])
    if is_aligned and (alibi_slopes is None or alibi_slopes.ndim == 1):
        ids = sequence_numbers(cu_seqlens_q, q.shape[0]), sequence_numbers(cu_seqlens_k, k.shape[0])
        options |= {"segment_ids": ids, "q_offset": 0, "return_lse": return_attn_probs}
        results = attend(q[None], k[None], v[None], alibi_slopes, options)
        out, lse = _pair(results, return_attn_probs)
        return (out[0], lse[0], None) if return_attn_probs else out[0]
    rows, columns = _Places.of(cu_seqlens_q, max_seqlen_q), _Places.of(cu_seqlens_k, max_seqlen_k)
    options |= {"kv_lengths": columns.lengths, "q_offset": columns.lengths - rows.lengths}
    options["return_lse"] = return_attn_probs
    results = attend(rows.apart(q), columns.apart(k), columns.apart(v), alibi_slopes, options)
    out, lse = _pair(results, return_attn_probs)
    joined = rows.joined(out, q.shape[0])
    return (joined, rows.joined(lse.mT, q.shape[0], -torch.inf).mT, None) if return_attn_probs else joined


def _varlen_on_shards(tensors: dict[str, Any], options: dict[str, Any], with_lse: bool) -> Probabilities:
    """Runs flash_attn_varlen_func on DTensors, whose heads may be sharded. Returns DTensors: out, or (out, lse, None).

    tensors: q, k, v and alibi_slopes by name. options: the other arguments by name, without return_attn_probs.
    """
    heads = (None, "heads", None)
    slopes = tensors["alibi_slopes"]
    of_slopes = (None, "heads") if isinstance(slopes, torch.Tensor) and slopes.ndim == 2 else ("heads",)
    roles = {"q": heads, "k": heads, "v": heads, "alibi_slopes": of_slopes}

    def run(**given: Any) -> Any:
        out, lse, _ = flash_attn_varlen_func(**given, return_attn_probs=True)
        return (out, lse) if with_lse else out

    results = dtensors.on_shards(run, tensors, roles, (heads, ("heads", None)), options)
    return (*results, None) if with_lse else results


@overload
def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = ...,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: tuple[int, int] = ...,
    softcap: float = ...,
    alibi_slopes: torch.Tensor | None = ...,
    deterministic: bool = ...,
    return_attn_probs: Literal[False] = ...,
) -> torch.Tensor: ...
@overload
def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = ...,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: tuple[int, int] = ...,
    softcap: float = ...,
    alibi_slopes: torch.Tensor | None = ...,
    deterministic: bool = ...,
    return_attn_probs: bool = ...,
) -> Probabilities: ...
def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Probabilities:
    """flash_attn_varlen_func with the keys and values in one tensor kv: [total_k, 2, Hkv, D]; kv[:, 0] has the keys.

    The other arguments and the result are as in flash_attn_varlen_func.
    """
    check_packed("kv", kv, 2, "[tokens, 2, heads, head_dim]")
    rest = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *rest)


@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float = ...,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: tuple[int, int] = ...,
    softcap: float = ...,
    alibi_slopes: torch.Tensor | None = ...,
    deterministic: bool = ...,
    return_attn_probs: Literal[False] = ...,
) -> torch.Tensor: ...
@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float = ...,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: tuple[int, int] = ...,
    softcap: float = ...,
    alibi_slopes: torch.Tensor | None = ...,
    deterministic: bool = ...,
    return_attn_probs: bool = ...,
) -> Probabilities: ...
def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Probabilities:
    """flash_attn_varlen_func with queries, keys and values in one tensor qkv: [total, 3, H, D], in this order.

    cu_seqlens, max_seqlen: of queries and keys alike: int32 [B + 1], the start of each sequence, then the end of the
    last; and the length of the longest sequence. The other arguments and the result are as in flash_attn_varlen_func.
    """
    check_packed("qkv", qkv, 3, "[tokens, 3, heads, head_dim]")
    rest = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    q, k, v = qkv.unbind(1)
    try:
        return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *rest)
    except (TypeError, ValueError) as error:
        rename(error, cu_seqlens_q="cu_seqlens", max_seqlen_q="max_seqlen")
        raise


def _checked_longest(name: str, starts: torch.Tensor, given: int, tokens: int) -> int:
    """Returns max_seqlen_q or max_seqlen_k as an int.

    Raises TypeError for a value that is no int, and ValueError for a sequence on a CPU that is longer, ends before its
    start, or lies outside of the tokens. The host never waits for a GPU.

    name: "q" or "k". starts: the cu_seqlens, int32 [B + 1]. given: the argument. tokens: the number of packed tokens.
    """
    if torch.compiler.is_compiling():
        return given
    given = plain_of(f"max_seqlen_{name}", given)
    if isinstance(given, bool) or not isinstance(given, int | torch.SymInt):
        raise TypeError(f"max_seqlen_{name}: got {type(given).__name__}, want an int")
    if len(starts) == 1 or not torch_internals.has_known_values(starts):
        return given
    if int(starts[0]) < 0 or int(starts[-1]) > tokens or bool((starts.diff() < 0).any()):
        raise ValueError(
            f"cu_seqlens_{name}: got {starts.tolist()}, want ascending numbers from 0 to {tokens}, the tokens"
        )
    longest = int(starts.diff().max())
    if given < longest:
        raise ValueError(f"max_seqlen_{name}: got {given}, want at least {longest}, the longest of cu_seqlens_{name}")
    return given


def _pair(results: Any, with_lse: bool) -> tuple[Any, Any]:
    """Returns (out, lse) from flash_attention's results; lse is None without with_lse."""
    return results if with_lse else (results, None)


def sequence_numbers(starts: torch.Tensor, tokens: int) -> torch.Tensor:
    """Returns the index of each packed token's sequence, int32 [1, tokens]; -1 outside of all sequences.

    starts: int32 [sequences + 1], the start of each sequence, then the end of the last.
    """
    positions = torch.arange(tokens, device=starts.device, dtype=starts.dtype)
    found = torch.searchsorted(starts.contiguous(), positions, right=True).to(torch.int32) - 1
    return torch.where(found < len(starts) - 1, found, -1)[None]


class _Places(NamedTuple):
    """Converts packed tokens [tokens, ...] to a batch [B, longest, ...] and back.

    lengths: int32 [B], the length of each sequence. starts: int32 [B + 1], their starts, then the end of the last.
    longest: the batch's size along the tokens.
    """

    lengths: torch.Tensor
    starts: torch.Tensor
    longest: int

    @classmethod
    def of(cls, starts: torch.Tensor, longest: int) -> "_Places":
        return cls(lengths=starts.diff(), starts=starts, longest=max(int(longest), 1))

    def apart(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the batch [B, longest, ...] of packed tokens [tokens, ...].

        The padding after a sequence holds arbitrary tokens.
        """
        if len(x) == 0:  # an index needs a token
            x = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
        index = self.starts[:-1, None] + torch.arange(self.longest, device=x.device, dtype=torch.int32)
        return x[index.clamp(max=x.shape[0] - 1)]

    def joined(self, x: torch.Tensor, tokens: int, fill: float = 0.0) -> torch.Tensor:
        """Returns the packed tokens [tokens, ...] of a batch [B, longest, ...]; `fill` outside of all sequences."""
        numbers = sequence_numbers(self.starts, tokens)[0]
        positions = torch.arange(tokens, device=x.device, dtype=torch.int32) - self.starts[:-1][numbers.clamp(min=0)]
        found = x[numbers.clamp(min=0), positions.clamp(min=0, max=self.longest - 1)]
        is_there = (numbers >= 0).reshape(-1, *(1,) * (found.ndim - 1))
        return torch.where(is_there, found, torch.full_like(found, fill))
