"""Texts that go over from one tokenizer's ids to another's and back."""

import functools
from collections.abc import Callable

import pytest
from byte_level import SPECIAL, byte_level_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from draftforge.specdec.tokenizer_bridge import Retokenized, TokenizerBridge

TEXT = [
    "The order has shipped and will arrive on Monday, said the other one.",
    "How do I reset my password? Open the settings and choose reset.",
    "Grüße aus Köln: 日本語 and naïve 🙂 words\n\n  with   spaces\tand lines.\n",
]
OTHER = ["Paris is a large city of two million people; the river runs on and on.", "def add(a, b):\n    return a + b\n"]
texts = st.text(st.sampled_from("  \n\tabthe order rest.,?éü日本🙂\ufffd"), max_size=40) | st.sampled_from(
    [*TEXT, *OTHER, f"{SPECIAL[1]}user\nhi{SPECIAL[2]}\n", f"a{SPECIAL[0]}b"]
)


@functools.cache
def bytes_of(vocabulary: int, other: bool = False) -> PreTrainedTokenizerFast:
    return byte_level_tokenizer(OTHER if other else TEXT, vocabulary)


@functools.cache
def sentencepiece_like() -> PreTrainedTokenizerFast:
    """Spaces as ▁, one put before every text, bytes where characters are unknown, and a token that texts begin with."""
    alphabet = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")  # of the training alone
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXT[:2], trainer)
    tokenizer.pre_tokenizer = None
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


@functools.cache
def words_in_lower_case() -> PreTrainedTokenizerFast:
    """Knows whole words alone: nothing that it reads comes back as it was."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(vocab_size=60, special_tokens=["[UNK]", "[END]"], show_progress=False)
    tokenizer.train_from_iterator(TEXT[:2], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="[END]")


TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "bytes": functools.partial(bytes_of, 300),
    "other-bytes": functools.partial(bytes_of, 320, other=True),
    "sentencepiece": sentencepiece_like,
    "words": words_in_lower_case,
}


def spelling(name: str) -> TokenizerBridge:
    tokenizer = TOKENIZERS[name]()
    return TokenizerBridge(tokenizer, len(tokenizer))


def known_ids(name: str, text: str) -> list[int]:
    return [*spelling(name).opening(text), 5]  # never empty, and not always what the tokenizer would have made


@pytest.mark.parametrize("own", TOKENIZERS)
@pytest.mark.parametrize("known", ["bytes", "sentencepiece"])
@settings(max_examples=30)
@given(start=texts, more=st.lists(texts, max_size=6), said=texts)
def test_it_does_not_matter_how_many_ids_come_at_once(
    known: str, own: str, start: str, more: list[str], said: str
) -> None:
    ids, grown = known_ids(known, start), [token for text in more for token in spelling(known).encode(text)]
    at_once, one_by_one = (Retokenized(spelling(known), spelling(own), ids) for _ in range(2))
    settled = [*at_once.settled, *at_once.extend(grown)]
    assert settled == [*one_by_one.settled, *(own for token in grown for own in one_by_one.extend([token]))]
    assert at_once.tail == one_by_one.tail and at_once.following(said) == one_by_one.following(said)


def test_a_long_text_that_is_cut_before_words_is_spelled_as_a_whole() -> None:
    """With one token that it begins with, and no space too many."""
    text = " ".join([*TEXT[:2], *TEXT[:2], *TEXT[:2]]) * 3
    ids, own = spelling("bytes").encode(text), spelling("sentencepiece")
    for start in (1, 40, 200):
        respelled = Retokenized(spelling("bytes"), own, ids[:start])
        settled = [*respelled.settled, *respelled.extend(ids[start:])]
        assert [*settled, *respelled.tail] == own.opening(text) and len(settled) > len(respelled.tail)


@settings(max_examples=60)
@given(start=texts, more=st.lists(texts, max_size=6))
def test_byte_level_tokenizers_read_the_very_text(start: str, more: list[str]) -> None:
    """Cut anywhere; but for the bytes at its end that are no whole character yet."""
    ids = known_ids("bytes", start)
    respelled, own = Retokenized(spelling("bytes"), spelling("other-bytes"), ids), list[int]()
    own += respelled.settled
    for text in more:
        new = spelling("bytes").encode(text)
        ids, own = [*ids, *new], [*own, *respelled.extend(new)]
    whole = spelling("bytes").text(ids, 0, len(ids)).rstrip("\ufffd")
    read = [*own, *respelled.tail]
    assert spelling("other-bytes").text(read, 0, len(read)) == whole


@pytest.mark.parametrize("known", ["bytes", "sentencepiece", "words"])
@settings(max_examples=60)
@given(start=texts, said=texts)
def test_what_follows_extends_the_ids_and_the_text(known: str, start: str, said: str) -> None:
    ids = known_ids(known, start)
    following = Retokenized(spelling(known), spelling("words"), ids).following(said)
    assert all(0 <= token < len(TOKENIZERS[known]()) for token in following)
    if following and known == "bytes":
        text = spelling(known).text([*ids, *following], 0, len(ids) + len(following))
        assert text == spelling(known).text(ids, 0, len(ids)).rstrip("\ufffd") + said.rstrip("\ufffd")


def following(known: str, ids: list[int], said: str) -> list[int]:
    return Retokenized(spelling(known), spelling("words"), ids).following(said)


@pytest.mark.parametrize("known", ["bytes", "sentencepiece"])
@pytest.mark.parametrize(
    ("start", "said"),
    [
        ("The order", " has shipped"),
        ("The order has", ", said the other"),
        ("The", "\n\nHow do"),
        (" ".join(TEXT[:2]), " Open the settings"),
    ],
)
def test_a_text_goes_on_as_its_tokenizer_would_spell_it(known: str, start: str, said: str) -> None:
    whole = spelling(known)
    ids = whole.opening(start)
    assert following(known, ids, said) == whole.opening(start + said)[len(ids) :] != []


def test_ids_that_the_text_would_change_are_not_followed() -> None:
    """A word that its tokenizer spells otherwise when it is whole."""
    spell = spelling("bytes")
    whole, cut = spell.encode("it has"), [*spell.encode("it"), *(token for one in " ha" for token in spell.encode(one))]
    assert whole[: len(cut)] != cut and spell.text(cut, 0, len(cut)) == "it ha"
    assert following("bytes", cut, "s the order") == []
    assert following("bytes", whole, " the order") == spell.encode(" the order")
    odd = [*cut, *spell.encode("s the order")]
    assert following("bytes", odd, " on Monday") == spell.encode(" on Monday")  # what is odd far back does not matter


def test_half_a_character_is_completed_or_left_alone() -> None:
    spell = spelling("bytes")
    ids = spell.encode("Köln 日")
    for missing in (1, 2):
        half = ids[:-missing]
        respelled = Retokenized(spell, spelling("other-bytes"), half)
        assert spelling("other-bytes").text(respelled.tail, 0, 99) == "Köln "
        assert respelled.following("日本") == [*ids[-missing:], *spell.encode("本")]
        assert respelled.following(" the") == []
    assert following("bytes", spell.encode("Köln"), " 日\ufffd") == spell.encode(" 日")


def test_what_a_model_does_not_know_is_left_out() -> None:
    tokenizer = bytes_of(300)
    assert all(token < 290 for token in TokenizerBridge(tokenizer, 290).encode(" ".join(TEXT)))
    assert any(token >= 290 for token in TokenizerBridge(tokenizer, 300).encode(" ".join(TEXT)))


def test_texts_begin_with_what_the_tokenizer_lets_them_begin_with() -> None:
    spell = spelling("sentencepiece")
    assert spell.opening("The") == [1, *spell.encode("The")]
    assert spell.opening("<s>The")[:2] != [1, 1]
    assert spelling("bytes").opening("The") == spelling("bytes").encode("The")
    assert spell.inside(" order") == spell.encode("order")  # the space is the word's, not put before it
    ids = spell.opening("The order has")
    assert spell.text(ids, len(ids) - len(spell.inside(" has")), len(ids)) == " has"
