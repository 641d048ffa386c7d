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
        self._caught: dict[int, list[torch.Tensor]] = {i: [] for i in layer_ids}

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
        for caught in self._caught.values():
            caught.clear()

    def _catcher(self, i: int):
        def hook(module, args, output):
            self._keep(i, output[0] if isinstance(output, (tuple, list)) else output)

        return hook

    def _catch_input(self, module, args, kwargs) -> None:
        self._keep(-1, args[0] if args else kwargs["hidden_states"])

    def _keep(self, i: int, states: torch.Tensor) -> None:
        if threading.get_ident() == self._thread:
            self._caught[i].append(states.detach().to(device=self.device, dtype=self.dtype))

    def take(self) -> torch.Tensor:
        """Features `[B, S, T * H]` of the positions forwarded since the last call, in the order of `layer_ids`.

        Raises:
            RuntimeError: when the target ran but its hooks did not.
        """
        if not all(self._caught.values()):
            raise RuntimeError(
                "the target ran, but the forward hooks on its tapped layers did not: it was compiled before this "
                "call (torch.compile does not look for hooks set later). Decode once with the drafter before "
                "compiling, compile with `torch._dynamo.config.skip_nnmodule_hook_guards = False`, or use the "
                "uncompiled model."
            )
        features = torch.cat([torch.cat(self._caught[i], dim=1) for i in self.layer_ids], dim=-1)
        for caught in self._caught.values():
            caught.clear()
        return features
