"""Folders of mneme in Hugging Face transformers.

    import mneme.transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer
    model = AutoModelForCausalLM.from_pretrained("folder")     # trained by mneme, or for it
    model.generate(**AutoTokenizer.from_pretrained("folder")("Once", return_tensors="pt"))

Registers model_type "mneme", and the types of flash-linear-attention that are our layers where that
package is not there to serve them. save_pretrained writes folders that the mneme program reads."""

import json
import sys

try:
    import torch
    import transformers
    from transformers import (AutoConfig, AutoModelForCausalLM, GenerationMixin, PretrainedConfig,
                              PreTrainedModel)
    from transformers.modeling_outputs import CausalLMOutputWithPast
except ImportError as _error:
    raise ImportError("mneme.transformers needs PyTorch and transformers: pip install torch "
                      f"transformers. The import says: {_error}") from None

from . import layers as _layers
from .torch import nn as _nn

__all__ = ["MnemeConfig", "MnemeForCausalLM", "States", "register"]

# transformers' own keys that config.json of a model of ours may carry
_KEPT = ("bos_token_id", "eos_token_id", "pad_token_id")


class MnemeConfig(PretrainedConfig):
    """A config.json of mneme: the keys of the file, as they are.

        MnemeConfig(layers="gdn*5, attention", hidden_size=512, vocab_size=50304)"""

    model_type = "mneme"
    attribute_map = {}

    def __init__(self, **given):
        own = {k: v for k, v in given.items() if k in _OWN_KEYS or k in _options()}
        rest = {k: v for k, v in given.items() if k not in own and k != "model_type"}
        self.mneme = {}
        if own:
            filled = dict(own)
            filled["model_type"] = given.get("model_type", self.model_type)
            self.mneme = _layers.describe_model(filled)["config"]
            for key, value in self.mneme.items():
                if key not in ("model_type", "architectures", "mneme_version"):
                    rest.setdefault(key, value)
            rest["num_hidden_layers"] = self.mneme["num_hidden_layers"]
        super().__init__(**rest)

    def to_dict(self):
        out = super().to_dict()
        out.pop("mneme", None)
        return out

    def to_diff_dict(self):
        return self.to_dict()

    def to_json_string(self, use_diff=True):
        """What is saved: the library's own spelling of the configuration, and token ids."""
        out = dict(self.mneme)
        out.update({k: getattr(self, k) for k in _KEPT if getattr(self, k, None) is not None})
        if "layers" in out:
            out["architectures"] = ["MnemeForCausalLM"]
        return json.dumps(out, indent=2) + "\n"


_OWN_KEYS = ("layers", "mixers", "vocab_size", "hidden_size", "num_hidden_layers",
             "intermediate_size", "hidden_ratio", "mlp", "decoder", "tie_word_embeddings",
             "norm_eps", "initializer_range", "logit_softcap", "max_position_embeddings", "attn",
             "hidden_act", "norm", "norm_bias", "norm_first",
             "max_cg_step_training", "max_cg_step_decoding")


def _options():
    return {option["name"] for row in _layers.kinds().values() for option in row["options"]}


_BY_POSITION = ("attention", "relu_attention", "diff_attention", "mla", "retnet", "hypermlp",
                "hyperglu")


class States(list):
    """What the layers remember of the tokens so far: one dict each, whose size does not grow with
    the sequence but for attention. The cache of `generate`."""

    is_compileable = False

    def get_seq_length(self, layer_idx=0):
        return self[0]["position"] if self else 0

    def get_max_cache_shape(self):
        return None

    def reorder_cache(self, beam_idx):
        for i, state in enumerate(self):
            self[i] = {k: v if k == "position" else v.index_select(0, beam_idx.to(v.device))
                       for k, v in state.items()}
        return self


class MnemeForCausalLM(PreTrainedModel, GenerationMixin):
    """A language model of mneme's layers in PyTorch; past_key_values are States."""

    config_class = MnemeConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _is_stateful = True
    _supports_cache_class = False
    _no_split_modules = ["Block"]
    _tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}

    def __init__(self, config):
        super().__init__(config)
        core = _nn.LanguageModel(config.mneme)
        self.described, self.model, self.lm_head = core.described, core.model, core.lm_head
        self.gradient_checkpointing = False
        self.post_init()

    def _init_weights(self, module):
        if isinstance(module, _nn.Mixer):
            module.reset_parameters()

    def get_input_embeddings(self):
        return self.model.embeddings

    def set_input_embeddings(self, value):
        self.model.embeddings = value

    def get_output_embeddings(self):
        return self.lm_head

    def set_output_embeddings(self, value):
        self.lm_head = value

    def forward(self, input_ids=None, attention_mask=None, past_key_values=None, labels=None,
                use_cache=None, inputs_embeds=None, logits_to_keep=0, cu_seqlens=None,
                return_dict=None, **kwargs):
        """Logits [B, T, vocabulary], the loss of `labels` shifted by one, and States. Rows that are
        padded on the left are read packed, without the padding."""
        x = self.model.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        use_cache = (not self.training) if use_cache is None else use_cache
        states = past_key_values if isinstance(past_key_values, States) and past_key_values else None
        shape, there = x.shape, self._hidden(attention_mask, x, states)
        if there is not None:
            lengths = there.sum(1).cpu()
            cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
            x = x[there].unsqueeze(0)
        kept = States()
        for i, (block, share) in enumerate(zip(self.model.layers, self.model.shares())):
            how = dict(state=None if states is None else states[i], return_state=use_cache,
                       cu_seqlens=cu_seqlens, **share)
            if self.gradient_checkpointing and self.training:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False, **how)
            else:
                x = block(x, **how)
            if use_cache:
                kept.append(x.state)
                x = x.output
        if there is not None:
            for state in kept:
                state["position"] = shape[1]
            x = x.new_zeros(shape).masked_scatter(there.unsqueeze(-1), x)
        x = self.model.norm(x)
        if isinstance(logits_to_keep, int) and logits_to_keep:
            x = x[:, -logits_to_keep:]
        logits = self.lm_head(x)
        cap = self.described["logit_softcap"]
        if cap:
            logits = cap * torch.tanh(logits / cap)
        loss = None
        if labels is not None:
            loss = torch.nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten().to(logits.device))
        if return_dict is False:
            return tuple(v for v in (loss, logits, kept if use_cache else None) if v is not None)
        return CausalLMOutputWithPast(loss=loss, logits=logits,
                                      past_key_values=kept if use_cache else None)

    def _hidden(self, mask, x, states):
        """Which tokens count, where padding stands before some; None where none does: what stands
        behind a row changes nothing in it."""
        if mask is None or mask.dim() != 2 or states or torch.compiler.is_compiling():
            return None
        there = mask[:, -x.shape[1]:].bool()
        if not (there[:, 1:] > there[:, :-1]).any():
            return None
        for block in self.model.layers:
            if block.attn.ccq or block.attn.kind in _BY_POSITION:
                raise ValueError(f"layer {block.attn.name} goes by positions, which padding on the "
                                 "left would move; pad on the right "
                                 "(tokenizer.padding_side = \"right\")")
        return there

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        """States are made by the first call: transformers' own caches are for keys and values."""

    def prepare_inputs_for_generation(self, input_ids, past_key_values=None, attention_mask=None,
                                      **kwargs):
        if past_key_values:
            input_ids, attention_mask = input_ids[:, past_key_values.get_seq_length():], None
        return {"input_ids": input_ids, "past_key_values": past_key_values, "use_cache": True,
                "attention_mask": attention_mask, "logits_to_keep": 1}

    @staticmethod
    def _reorder_cache(past_key_values, beam_idx):
        return past_key_values.reorder_cache(beam_idx)


def _types_of_others():
    """Types of flash-linear-attention for our layers that nobody serves here: not registered, or by
    that package on a machine without a GPU, where its kernels do not run."""
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    idle = "fla" in sys.modules and not torch.cuda.is_available()
    return [name for name in _layers.model_types() if name not in known
            or (idle and known[name].__module__.startswith("fla."))]


registered = []    # types of others that are served here


def register():
    """Makes AutoConfig and AutoModelForCausalLM know our folders. Importing this module does it."""
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    if "mneme" not in known:
        AutoConfig.register("mneme", MnemeConfig)
        AutoModelForCausalLM.register(MnemeConfig, MnemeForCausalLM)
    for name in _types_of_others():
        config = type("Mneme_" + name, (MnemeConfig,), {
            "model_type": name, "__init__": lambda self, **given: MnemeConfig.__init__(self,
                                                                                       **given)})
        model = type("Mneme_" + name + "ForCausalLM", (MnemeForCausalLM,), {"config_class": config})
        AutoConfig.register(name, config, exist_ok=True)
        AutoModelForCausalLM.register(config, model, exist_ok=True)
        registered.append(name)


register()
