"""The engine that users find at `trainer.vllm_generation.llm` where it sleeps between rollouts.

vLLM's executor counts as asleep until all of it is awake, and a generation then waits for ever. So each call that runs
the engine opens it first. Everything else is the engine's own: nothing of vLLM is patched, and no result is touched.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

CALLS_THAT_RUN_THE_ENGINE = frozenset(
    {
        *("generate", "chat", "beam_search", "wait_for_completion"),
        *("encode", "embed", "classify", "score", "reward"),
        *("collective_rpc", "apply_model"),  # they may read weights, which are not mapped while the engine sleeps
    }
)


class EngineProxy:
    """Stands for a `vllm.LLM`: is one to `isinstance`, and has its attributes, which are read and written there.

    Copies and pickles are those of the engine, as are its methods that only queue or ask (`enqueue`, `get_tokenizer`)
    and those by which a user puts it to sleep and wakes it. `llm.llm_engine` is vLLM's own and wakes nothing.

    Args:
        engine: vLLM's.
        opened: gives a context in which the engine may run; may be entered inside itself.
    """

    __slots__ = ("__weakref__", "_opened", "_proxied_engine")

    def __init__(self, engine: Any, opened: Callable[[], AbstractContextManager[None]]) -> None:
        object.__setattr__(self, "_proxied_engine", engine)
        object.__setattr__(self, "_opened", opened)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._proxied_engine)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._proxied_engine, name)
        return self._opening(value) if name in CALLS_THAT_RUN_THE_ENGINE else value

    def _opening(self, call: Callable[..., Any]) -> Callable[..., Any]:
        opened = self._opened

        @functools.wraps(call)
        def call_opened(*args: Any, **kwargs: Any) -> Any:
            with opened():
                return call(*args, **kwargs)

        return call_opened

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._proxied_engine, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._proxied_engine, name)

    def __dir__(self) -> list[str]:
        return dir(self._proxied_engine)

    def __repr__(self) -> str:
        return repr(self._proxied_engine)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._proxied_engine.__reduce_ex__(protocol)
