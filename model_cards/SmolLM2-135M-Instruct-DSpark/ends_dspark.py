"""Where a call ends: EOS, stop strings and any criterion, tested on every prefix of an accepted block.

The host tests its criteria once a block, so one that comes true inside a block is overrun. Here every prefix is
tested in order, as plain decoding would, and what the call returns (ids, stream, per-token tuples, cache) ends at the
first hit. That is exact for every criterion that is a function of the prefix.
"""

import torch
from transformers.generation import StoppingCriteria, StoppingCriteriaList


class BlockEnds(StoppingCriteria):
    """The one criterion the host sees, and the streamer and cache crop that wait for its verdict.

    The host hands a block to the streamer and crops the cache before it asks the criteria. Both are held back until
    the verdict: a sliding-window layer that was cropped to its window could not be cropped further.

    Args:
        criteria: the call's own.
        streamer: the call's, or `None`.
        cache: the target's cache of the call.
        prompt_length: length of `input_ids` when the call began.
        unverified: answers whether the host is asking about drafts that are not verified yet (it did until 5.17).
    """

    def __init__(self, criteria: StoppingCriteriaList, streamer, cache, prompt_length: int, unverified):
        self.criteria = criteria
        self.streamer = streamer
        self.cache = cache
        self.prompt_length = self.length = prompt_length
        self.unverified = unverified
        self.overrun = 0  # accepted tokens behind the end
        self._crop = None

    def __enter__(self) -> "BlockEnds":
        self._host_crop = self.cache.crop
        self.cache.crop = self._hold_crop
        self._recorded = [getattr(layer, "record_past", False) for layer in self.cache.layers]
        return self

    def __exit__(self, *_) -> None:
        del self.cache.crop
        # The host's loop makes sliding layers keep what a crop may need. Until 5.17 they do so for good, and plain
        # decoding cannot go on from such a cache.
        for i, layer in enumerate(self.cache.layers):
            if hasattr(layer, "record_past"):
                layer.record_past = self._recorded[i] if i < len(self._recorded) else False
        self.unverified = None  # leads to the generator and back here: the cache would wait for the collector

    def _hold_crop(self, tokens: int) -> None:
        self._crop = tokens

    def release_crop(self) -> None:
        """Carry out the crop that was held back. To be called before the target runs again."""
        if self._crop is not None:
            self._host_crop(self._crop)
            self._crop = None

    def __call__(self, input_ids: torch.LongTensor, scores, **kwargs) -> torch.BoolTensor:
        done = torch.zeros(1, dtype=torch.bool, device=input_ids.device)
        if self.unverified():
            return done
        length = input_ids.shape[1]
        for end in range(self.length + 1, length + 1):
            prefix_scores = scores if scores is None else scores[: end - self.prompt_length]
            if self.streamer is not None:
                self.streamer.put(input_ids[0, end - 1 : end].cpu())
            if bool(self.criteria(input_ids[:, :end], prefix_scores, **kwargs).all()):
                self.overrun = length - end
                done[:] = True
                break
        self.length = length
        return done

    # What the host's loop does with a streamer. `put` comes before the verdict, which puts the tokens itself, one by
    # one as plain decoding does.
    def put(self, value) -> None:
        pass

    def end(self) -> None:
        self.streamer.end()

    def trim(self, output):
        """Cut what the host returned at the end that was found: ids `[1, S]`, or a dict output and its cache."""
        if self._crop is not None:
            self._crop -= self.overrun
            self.release_crop()
        if not self.overrun:
            return output
        if isinstance(output, torch.Tensor):
            return output[:, : -self.overrun]
        output.sequences = output.sequences[:, : -self.overrun]
        for name in ("scores", "logits", "attentions", "hidden_states"):
            if output.get(name) is not None:
                setattr(output, name, output[name][: -self.overrun])
        return output
