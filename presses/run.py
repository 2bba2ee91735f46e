"""A press at work on one model: hooks, attention function, cache; everything touched is restored on exit."""

import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function

from kvstitch.presses.attention import Scratch, chunk_attention, decode_attention
from kvstitch.presses.cache import Request, StitchLayer
from kvstitch.presses.model import read_model
from kvstitch.presses.versions import chunks_are_right, passed_cache
from kvstitch.views import Needs, Rotary

_NAME_PREFIX = "kvstitch_"
_PROMPT_ARGUMENTS = ("inputs_embeds", "inputs", "input_ids")
_run_numbers = itertools.count()


class Run:
    """One press on one model, from the entry of the `with` block to its exit.

    What a run shows (`stored_tokens`, `positions`, …) is about the cache that went through the model last, and stays
    readable after the block.
    """

    def __init__(self, press: object, model: PreTrainedModel, needs: Needs, growth_tokens: int):
        self.press = press
        self.model = model
        self._needs = needs
        self._growth_tokens = growth_tokens
        # The RoPE is read even if no part asks for it: a model without one that we understand is refused.
        self._facts = read_model(model, needs)
        self._layer_of_module = {module: index for index, module in self._facts.attention.items()}
        self._cache: Cache | None = None
        self._undo: list[Callable[[], None]] = []
        self._user_attention = "sdpa"
        self._installed_name: str | None = None
        # Logical length of the prompt while `generate` runs: its last chunk may be a single token.
        self._prompt_until = 0
        # `generate` of older versions numbers the tokens of later chunks from 0 again.
        self._numbers_chunks = False
        self._use_stock = False
        self._scratch = Scratch()
        self._forwards = 0
        self._slots_summed = 0.0
        self.peak_tokens = 0

    # -- what users read --------------------------------------------------------------------------------------------

    @property
    def stored_tokens(self) -> list[int]:
        """Slots now stored in each compressed layer (its largest head)."""
        return [layer.length for layer in self._layers()]

    @property
    def stored_bytes(self) -> int:
        """Bytes of the storage behind all keys and values of the compressed layers, room for growth included."""
        return sum(layer.stored_bytes for layer in self._layers())

    @property
    def kept_bytes(self) -> int:
        """Bytes of the keys and values that can still be attended to.

        Less than `stored_bytes` by the room for growth and by slots that are stored but empty: padding, and heads or rows
        that keep fewer than the fullest one (`HeadAdaptive`).
        """
        return sum(layer.kept_bytes for layer in self._layers())

    @property
    def num_layers(self) -> int:
        """Decoder layers of the model, sliding-window layers included."""
        return self._facts.num_layers

    @property
    def rotary(self) -> Rotary:
        """The RoPE of the compressed layers, as read from the model."""
        return self._facts.rotary

    @property
    def layers(self) -> dict[int, StitchLayer]:
        """The compressed cache layers by decoder layer; empty before the first forward."""
        return dict(zip(self._facts.attention, self._layers()))

    @property
    def cache(self) -> Cache | None:
        """The cache that went through the model last; None before the first forward."""
        return self._cache

    @property
    def seen_tokens(self) -> int:
        """Logical length of the sequence in the cache, padding included."""
        layers = self._layers()
        return layers[0].seen_tokens if layers else 0

    @property
    def mean_tokens(self) -> float:
        """Stored slots, averaged over layers and over all forwards of this run."""
        return self._slots_summed / self._forwards if self._forwards else 0.0

    def positions(self, layer: int) -> Tensor:
        """`[B, H, T]` int64: the logical position that each slot of a decoder layer holds, -1 where it is empty.

        Raises:
            ValueError: the layer is not one that the press compresses.
        """
        if layer not in self._facts.attention:
            raise ValueError(f"layer {layer} is not compressed; compressed layers are {sorted(self._facts.attention)}")
        self._request()
        return self._cache.layers[layer].positions

    # -- entering and leaving ---------------------------------------------------------------------------------------

    def __enter__(self):
        self._install()
        return self

    def __exit__(self, *exception) -> None:
        self._uninstall()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The model as it was before the press, for as long as the block lasts (a dense forward in between)."""
        was_at_work = bool(self._undo)
        self._uninstall()
        try:
            yield
        finally:
            if was_at_work:
                self._install()

    def _install(self) -> None:
        config = self._facts.decoder.config
        attention = config._attn_implementation
        if str(attention).startswith(_NAME_PREFIX):
            other = "this press is" if attention == self._installed_name else "another press is"
            raise RuntimeError(f"{other} at work on this model; leave its `with` block first")
        # Only now: the block that is still open puts back what it found.
        self._user_attention = attention
        name = f"{_NAME_PREFIX}{next(_run_numbers)}"
        AttentionInterface.register(name, self._attention)
        AttentionMaskInterface.register(name, self._mask)
        config._attn_implementation = self._installed_name = name
        before = self._facts.decoder.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        after = self._facts.decoder.register_forward_hook(self._after_forward, always_call=True)
        self._undo = [
            before.remove,
            after.remove,
            lambda: setattr(config, "_attn_implementation", self._user_attention),
            lambda: AttentionInterface._global_mapping.pop(name),
            lambda: AttentionMaskInterface._global_mapping.pop(name),
            self._guard_generate(),
        ]

    def _uninstall(self) -> None:
        for undo in reversed(self._undo):
            undo()
        self._undo = []
        for layer in self._layers():
            layer.request.announced = False

    def _guard_generate(self) -> Callable[[], None]:
        """Put a check in front of `model.generate`, which would otherwise run for a while before it fails."""
        generate = getattr(self.model, "generate", None)
        if generate is None:
            # A model without a head: it is called by hand.
            return lambda: None
        had_own = "generate" in vars(self.model)

        def guarded(*args, **kwargs):
            given = _arguments_of(generate, args, kwargs)
            config = given.get("generation_config") or self.model.generation_config
            for option in ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit"):
                if given.get(option, getattr(config, option, None)) is not None:
                    raise NotImplementedError(
                        f"assisted decoding ({option}) rolls the cache back, which eviction cannot undo; generate without it"
                    )
            if given.get("output_attentions", config.output_attentions):
                raise NotImplementedError(
                    "output_attentions=True: attention under a press does not make the weights; leave it out"
                )
            if given.get("use_cache", config.use_cache) is False:
                raise NotImplementedError(
                    "use_cache=False keeps nothing that a press could compress; leave it out, or generate without the press"
                )
            implementation = given.get("cache_implementation", config.cache_implementation)
            if implementation not in (None, "dynamic", "dynamic_full"):
                raise NotImplementedError(
                    f"cache_implementation={implementation!r} cannot be compacted; leave it out, the press needs a dynamic cache"
                )
            if given.get("prefill_chunk_size", getattr(config, "prefill_chunk_size", None)) is not None:
                self._refuse_chunks_of_generate(given)
                self._numbers_chunks = given.get("position_ids") is None
            prompt = next((given[name] for name in _PROMPT_ARGUMENTS if given.get(name) is not None), None)
            self._prompt_until = 0 if prompt is None else prompt.shape[1]
            try:
                return generate(*args, **kwargs)
            finally:
                self._prompt_until, self._numbers_chunks = 0, False

        self.model.generate = guarded
        if had_own:
            return lambda: setattr(self.model, "generate", generate)
        return lambda: delattr(self.model, "generate")

    def _refuse_chunks_of_generate(self, given: dict) -> None:
        """`prefill_chunk_size` where this version of transformers gets it wrong, and numbering its chunks does not mend it."""
        if chunks_are_right(self.model):
            return
        cache = given.get("past_key_values")
        reason = None
        if self._facts.num_sliding_layers:
            reason = "reads the prompts of models with sliding-window layers wrongly"
        elif isinstance(cache, Cache) and cache.get_seq_length() > 0:
            reason = "does not go on from a cache that holds tokens"
        elif given.get("position_ids") is not None:
            reason = "gives each chunk the last of your position_ids"
        if reason is not None:
            raise NotImplementedError(
                f"`generate(prefill_chunk_size=…)` of this version of transformers {reason}; feed the chunks to the model "
                "yourself, or take a newer transformers"
            )

    # -- around each forward ----------------------------------------------------------------------------------------

    def before_tokens(self, request: Request, count: int) -> None:
        """Called before `count` new tokens enter the cache; presses compact here."""

    def after_prefill(self, request: Request) -> None:
        """Called once, when the prompt is complete and before the first decoded token enters."""

    def _before_forward(self, decoder: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if decoder.config._attn_implementation != self._installed_name:
            raise RuntimeError(
                f"the attention implementation was set to {decoder.config._attn_implementation!r} inside the block, which "
                "takes the press off; choose it before `with press(model):`"
            )
        if kwargs.get("output_attentions") or getattr(decoder.config, "output_attentions", False):
            raise NotImplementedError(
                "output_attentions=True: attention under a press does not make the weights; leave it out"
            )
        if decoder.training:
            raise RuntimeError(
                "the model was put into training mode inside the block: call model.eval(), a press serves inference"
            )
        arguments = dict(zip(self._facts.argument_names, args)) | kwargs
        cache = passed_cache(arguments)
        use_cache = arguments.get("use_cache")
        if not (decoder.config.use_cache if use_cache is None else use_cache) and cache is None:
            self._cache = None
            return args, kwargs
        if cache is None:
            cache = DynamicCache(config=decoder.config)
            arguments[self._facts.cache_argument] = cache
        mask, position_ids = arguments.get("attention_mask"), arguments.get("position_ids")
        # Before anything is evicted for a forward that is refused.
        tokens = arguments.get("input_ids") if arguments.get("input_ids") is not None else arguments["inputs_embeds"]
        _refuse_arguments(mask, position_ids, tokens.shape[1])
        request = self._admit(cache, mask)
        _refuse_torn(self._layers())
        if mask is not None and mask.shape[1] > self.seen_tokens + tokens.shape[1]:
            # That of the whole text, given with a part of it: columns of tokens to come.
            mask = arguments["attention_mask"] = mask[:, : self.seen_tokens + tokens.shape[1]]
        if self._numbers_chunks and self.seen_tokens < self._prompt_until:
            position_ids = None
        self._advance(request, tokens.shape[1])
        if position_ids is None:
            position_ids = self._position_ids(tokens, mask)
            if "position_ids" in self._facts.argument_names:
                arguments["position_ids"] = position_ids
        self._announce(request, tokens, mask, position_ids)
        layers = self._layers()
        self._use_stock = tokens.shape[1] > 1 and all(layer.fits_masks for layer in layers)
        return (), arguments

    def _after_forward(self, decoder: nn.Module, args: tuple, output) -> None:
        layers = self._layers()
        if not layers:
            return
        layers[0].request.announced = False
        lengths = [layer.length for layer in layers]
        self._forwards += 1
        self._slots_summed += sum(lengths) / len(lengths)
        self.peak_tokens = max(self.peak_tokens, max(lengths))

    def _admit(self, cache: Cache, mask: Tensor | None) -> Request:
        """Put our layers in place of the full-attention layers of a cache, in place, and return what they share."""
        self._cache = None
        full = self._facts.attention
        ours = [layer for layer in getattr(cache, "layers", ()) if isinstance(layer, StitchLayer)]
        if ours:
            # Compared by value: a deep copy of the cache still belongs to this press.
            if ours[0].owner != self.press:
                self._take_over(ours)
            self._cache = cache
            return ours[0].request
        _refuse_cache(cache)
        self._cache = cache
        request = Request()
        stock = cache.layers or DynamicCache(config=self._facts.decoder.config).layers
        for index in full:
            layer = StitchLayer(request, self._needs, self._facts.rotary, self._growth_tokens)
            layer.owner = self.press
            if stock[index].is_initialized and stock[index].get_seq_length() > 0:
                self._fill(layer, stock[index].keys, stock[index].values, mask)
            stock[index] = layer
        request.beside = tuple(layer for index, layer in enumerate(stock) if index not in full)
        cache.layers = stock
        cache.layer_class_to_replicate = None
        return request

    def _fill(self, layer: StitchLayer, keys: Tensor, values: Tensor, mask: Tensor | None) -> None:
        """Take over tokens that were cached before the press; the mask of the forward tells which of them are padding."""
        count = keys.shape[2]
        if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[1] < count:
            layer.update(keys, values)
            return
        real = mask[:, :count].to(device=keys.device, dtype=torch.bool)
        request = layer.request
        request.positions = torch.where(real, real.cumsum(dim=-1) - 1, -1)
        request.has_padding = not bool(real.all())
        request.announced = True
        layer.update(keys, values)
        request.announced = False

    def _take_over(self, layers: list[StitchLayer]) -> None:
        for layer in layers:
            layer.serve(self._needs, self._facts.rotary, self._growth_tokens)
            layer.owner = self.press

    def _advance(self, request: Request, count: int) -> None:
        if request.in_prefill and count == 1 and self.seen_tokens > 0 and self.seen_tokens >= self._prompt_until:
            self.end_prefill()
        self.before_tokens(request, count)

    def end_prefill(self) -> None:
        """Say that the prompt is complete; a single new token says it too. Needed only before teacher-forced chunks."""
        request = self._request()
        if request.in_prefill:
            request.in_prefill = False
            request.counted_from = self.seen_tokens
            self.after_prefill(request)

    def _position_ids(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        """`[B, N]` as `generate` makes them: padding does not count, so that a row is what it would be alone."""
        start, count = self.seen_tokens, tokens.shape[1]
        if mask is None or mask.shape[1] != start + count:
            # The cache remembers its padding where the mask does not tell.
            layers = self._layers()
            first = layers[0].next_position()[:, None].to(tokens.device) if start and layers[0].had_padding else start
            steps = torch.arange(count, device=tokens.device)[None].expand(tokens.shape[0], -1)
            return first + steps
        # The sum of a row and not its running sum: a decoded token must not cost a tensor as long as the cache.
        earlier = mask[:, :start].sum(dim=-1, keepdim=True)
        return (earlier + mask[:, start:].cumsum(dim=-1) - 1).clamp(min=0).to(tokens.device)

    def _announce(self, request: Request, tokens: Tensor, mask: Tensor | None, position_ids: Tensor) -> None:
        """Tell the layers which positions arrive, so that they know them without a look at the model's arguments."""
        batch, count = tokens.shape[:2]
        # Layers hold on to it, and the caller may count up in the tensor that it gave.
        positions = position_ids.expand(batch, -1).clone()
        request.has_padding = False
        if mask is not None:
            real = mask[:, -count:].to(device=positions.device, dtype=torch.bool)
            # A decode step on a GPU must not wait for the device: one decoded token is taken to be real there unless the
            # request has padding anyway.
            may_look = count > 1 or _costs_no_wait(mask)
            if may_look or self._layers()[0].has_empty:
                request.has_padding = not bool(real.all()) if may_look else True
                positions = torch.where(real, positions, -1)
        request.positions = positions
        request.announced = True

    # -- attention --------------------------------------------------------------------------------------------------

    def _attention(self, module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
        index = self._layer_of_module.get(module)
        if index is None or self._cache is None:
            stock = self._user_function(module)
            return stock(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
        layer = self._cache.layers[index]
        layer.query_memory.remember(query, layer.request.positions)
        if query.shape[2] > 1:
            out = self.observe_chunk(index, layer, query)
            if out is not None:
                return out.transpose(1, 2).contiguous(), None
        if self._use_stock:
            stock = self._user_function(module)
            return stock(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
        scaling = module.scaling if scaling is None else scaling
        extras = {"softcap": kwargs.get("softcap"), "sink_logits": kwargs.get("s_aux")}
        if query.shape[2] == 1:
            out = self.decode(index, layer, query, scaling, extras)
        else:
            out = chunk_attention(query, key, value, layer.bias, scaling, **extras)
        return out.transpose(1, 2).contiguous(), None

    def observe_chunk(self, index: int, layer: StitchLayer, query: Tensor) -> Tensor | None:
        """Called with the queries `[B, Q, N, D]` of every forward of several tokens; their keys are in the layer.

        Returns: the attention's output `[B, Q, N, D]`, if looking at the queries gives it; None: it is still to be done.
        """

    def decode(self, index: int, layer: StitchLayer, query: Tensor, scaling: float, extras: dict) -> Tensor:
        """Attention of one new token, `[B, Q, 1, D]`; presses that read a part of the cache override it."""
        return decode_attention(query, layer.keys, layer.values, layer.bias, scaling, scratch=self._scratch, **extras)

    def _mask(self, *args, **kwargs):
        """The user's own mask wherever the user's own attention will run; our attention builds none at all."""
        if self._use_stock or self._cache is None or kwargs.get("local_size") is not None:
            function = ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.get(self._user_attention)
            return None if function is None else function(*args, **kwargs)
        if (
            kwargs.get("mask_function", causal_mask_function) is not causal_mask_function
            and self._layers()[0].request.positions.shape[1] > 1
        ):
            raise NotImplementedError(
                "a model with a mask of its own (not plain causal) cannot go on after a compaction"
            )
        return None

    def _user_function(self, module: nn.Module) -> Callable:
        modeling = sys.modules[type(module).__module__]
        functions = getattr(modeling, "ALL_ATTENTION_FUNCTIONS", AttentionInterface())
        return functions.get(self._user_attention, getattr(modeling, "eager_attention_forward", None))

    def _layers(self) -> list[StitchLayer]:
        if self._cache is None:
            return []
        return [self._cache.layers[index] for index in self._facts.attention]

    def _request(self) -> Request:
        if self._cache is None or not self._layers()[0].is_initialized:
            raise RuntimeError("nothing has run through the model yet")
        return self._layers()[0].request


def _arguments_of(function: Callable, args: tuple, kwargs: dict) -> dict:
    """What was passed, by name, however it was passed."""
    bound = inspect.signature(function).bind_partial(*args, **kwargs).arguments
    return bound | bound.pop("kwargs", {})


def _refuse_cache(cache: Cache) -> None:
    foreign = {type(layer) for layer in getattr(cache, "layers", ())} - {DynamicLayer, DynamicSlidingWindowLayer}
    if foreign or not isinstance(cache, DynamicCache):
        names = ", ".join(sorted(kind.__name__ for kind in foreign)) or type(cache).__name__
        raise NotImplementedError(
            f"a press compacts dynamic caches; static, quantised and encoder-decoder caches cannot be compacted, got {names}"
        )
    if getattr(cache, "offloading", False):
        raise NotImplementedError("a press does not support offloaded caches: keys and values must stay on the device")


def _refuse_arguments(mask: object, position_ids: Tensor | None, count: int) -> None:
    if position_ids is not None and position_ids.dim() != 2:
        raise NotImplementedError(
            f"position_ids of shape {tuple(position_ids.shape)} are not supported, expected [B, N]"
        )
    if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
        raise NotImplementedError(
            "a press needs the 2-D attention mask [B, N] (1 = token, 0 = padding); a custom mask cannot follow the slots "
            f"through evictions, got {_describe(mask)}"
        )
    if mask is not None and mask.shape[1] < count:
        raise ValueError(f"the attention mask must cover at least the {count} new tokens, got {_describe(mask)}")


def _refuse_torn(layers: list[StitchLayer]) -> None:
    """A forward or a roll-back that ended in an exception left its tokens in some layers only."""
    beside = layers[0].request.beside
    seen = {layer.seen_tokens for layer in layers}
    seen |= {layer.get_seq_length() for layer in beside if layer.is_initialized}
    if len(seen) > 1:
        raise RuntimeError(
            f"a forward or roll-back of this cache ended in the middle, so that its layers hold {min(seen)} to {max(seen)} tokens; begin "
            "with a new cache"
        )


def _costs_no_wait(tensor: Tensor) -> bool:
    """Whether a value can be read at once."""
    return tensor.device.type == "cpu"


def _describe(mask) -> str:
    return f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
