"""Text on the host, without jax: tokenizers, streamed text, stop strings, chat templates."""

from jaxinfer.text.chat import encode_chat
from jaxinfer.text.detokenizer import IncrementalDetokenizer
from jaxinfer.text.gguf_vocab import tokenizer_from_gguf
from jaxinfer.text.hugging_face import tokenizer_from_json
from jaxinfer.text.loading import load_tokenizer
from jaxinfer.text.sentence_piece import tokenizer_from_sentencepiece
from jaxinfer.text.stop import StopMatcher
from jaxinfer.text.template import ChatTemplate, ChatTemplateError, render_chat
from jaxinfer.text.tokenizer import Tokenizer

__all__ = [
    "ChatTemplate",
    "ChatTemplateError",
    "IncrementalDetokenizer",
    "StopMatcher",
    "Tokenizer",
    "encode_chat",
    "load_tokenizer",
    "render_chat",
    "tokenizer_from_gguf",
    "tokenizer_from_json",
    "tokenizer_from_sentencepiece",
]
