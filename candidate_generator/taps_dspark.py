"""Target features: the raw outputs of the tapped layers, caught by forward hooks while a call runs."""

import threading

import torch


class FeatureTaps:
    """Context manager that collects the tapped layers' outputs of the target forwards in between.

    Hooks rather than `output_hidden_states`: the meaning of its indices changed twice between host releases, and all
    layers of a long prompt would be kept. Only forwards of the thread that entered are caught, so others may use the
    same target meanwhile.

    Args:
        layers: the target's decoder layers.
        layer_ids: tapped ids; `-1` is the input of layer 0, the embeddings.
        device, dtype: where and how the features are kept (the drafter's).
    """

    def __init__(self, layers, layer_ids: list[int], device: torch.device, dtype: torch.dtype):
        self.layers = layers
        self.layer_ids = layer_ids
        self.device, self.dtype = device, dtype
        self._thread = threading.get_ident()
        self._handles: list = []
        self._caught: dict[int, torch.Tensor] = {}

    def __enter__(self) -> "FeatureTaps":
        for i in self.layer_ids:
            if i == -1:
                handle = self.layers[0].register_forward_pre_hook(self._catch_input, with_kwargs=True)
            else:
                handle = self.layers[i].register_forward_hook(self._catcher(i))
            self._handles.append(handle)
        return self

    def __exit__(self, *_) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._caught.clear()

    def _catcher(self, i: int):
        def hook(module, args, output):
            self._keep(i, output[0] if isinstance(output, (tuple, list)) else output)

        return hook

    def _catch_input(self, module, args, kwargs=None) -> None:
        self._keep(-1, args[0] if args else (kwargs or {}).get("hidden_states"))

    def _keep(self, i: int, states: torch.Tensor | None) -> None:
        # Another thread may be in a forward of its own; a processor of this call may run the target once more.
        if threading.get_ident() != self._thread or i in self._caught:
            return
        if states is None or states.dim() != 3:
            what = "nothing" if states is None else f"a tensor of shape {tuple(states.shape)}"
            raise ValueError(f"tapped layer {i} of the target hands over {what}, not hidden states [B, S, H].")
        self._caught[i] = states.detach().to(device=self.device, dtype=self.dtype)

    def clear(self) -> None:
        """Forget what was caught; the next forward counts."""
        self._caught.clear()

    def take(self) -> torch.Tensor:
        """Features `[B, S, T * H]` of the first forward since `clear` or the last call, in the order of `layer_ids`.

        Raises:
            RuntimeError: when the target ran but its hooks did not, or not over the same positions.
        """
        if len(self._caught) != len(self.layer_ids):
            raise RuntimeError(
                "the target ran, but the forward hooks on its tapped layers did not: it was compiled before this "
                "call (torch.compile does not look for hooks set later). Decode once with the drafter before "
                "compiling, compile with `torch._dynamo.config.skip_nnmodule_hook_guards = False`, or use the "
                "uncompiled model."
            )
        features = [self._caught[i] for i in self.layer_ids]
        self._caught.clear()
        if len({f.shape[1] for f in features}) > 1:
            raise RuntimeError(
                "the tapped layers ran over different numbers of positions: some of this target's layers skip part "
                "of the prompt (shared keys and values). Use a drafter that taps the layers before those."
            )
        return torch.cat(features, dim=-1)
