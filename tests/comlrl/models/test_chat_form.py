"""Which models are read in their tokenizer's chat template."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from comlrl.errors import UserError
from comlrl.models.pretrained import build_team, load_encoder
from comlrl.models.prompt_encoder import PromptEncoder
from comlrl.tasks.prompts import Prompts
from comlrl.trainers.launch.checks.at_hand import agents_at_hand
from comlrl.types import Message
from tests.support import tiny_tokenizers as tokenizers
from tests.support.runs import resolved
from tests.support.tiny_models import CHAT, EOS, config, folder, tokenizer
from tests.support.tiny_tokenizers import CHATML, GEMMA, LLAMA3, MISTRAL

QUICKSTART = Path(__file__).parents[3] / "configs/magrpo_quickstart.yaml"

USER = (Message("user", "abc"),)
THINKS = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")


def encoder(template: str | None, eos: str, *special: str, **settings) -> PromptEncoder:
    made = tokenizers.byte_level(*special)
    made.chat_template, made.eos_token = template, eos
    return PromptEncoder(made, **settings)


@pytest.mark.parametrize(
    ("template", "eos", "special", "chats"),
    [
        (CHATML, "<|im_end|>", ("<|im_start|>", "<|im_end|>", "<|endoftext|>"), True),
        (CHATML, "<|endoftext|>", ("<|im_start|>", "<|im_end|>", "<|endoftext|>"), False),
        (LLAMA3, "<|eot_id|>", ("<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"), True),
        (LLAMA3, "<eos>", ("<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"), False),
        (MISTRAL, "</s>", ("<s>", "</s>", "[INST]", "[/INST]"), True),
        (GEMMA, "<eos>", ("<bos>", "<start_of_turn>", "<end_of_turn>"), False),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", "<eos>", (), True),
        ("{{ raise_exception('no') }}", "<eos>", (), True),
        (None, "<eos>", (), False),
    ],
)
def test_a_base_model_is_no_chat_model_because_its_tokenizer_has_a_template(
    template, eos, special, chats
):
    made = encoder(template, eos, *special)
    assert made.chats is chats
    assert eos in made.form[1] or made.end_of_turn is None
    if template is not None:
        assert encoder(template, eos, *special, chat=True).chats
        assert not encoder(template, eos, *special, chat=False).chats


def test_the_model_s_other_ends_count():
    special = ("<bos>", "<start_of_turn>", "<end_of_turn>")
    end = tokenizers.byte_level(*special).convert_tokens_to_ids("<end_of_turn>")
    assert encoder(GEMMA, "<eos>", *special, ends=(EOS, end)).chats


def base_model(tmp_path: Path) -> str:
    """With a chat template that ends turns with <pad>, which the model does not know as an end."""
    template = CHAT.replace("</>", "</><pad>")
    for file in folder("llama").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    made = tokenizer(chat=True)
    made.chat_template = template
    made.save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == template
    return str(tmp_path)


@pytest.mark.parametrize("chat", ["auto", True, False])
def test_runs_dry_runs_and_shown_prompts_agree(tmp_path, chat):
    made = config(agent_model__name=base_model(tmp_path), agent_model__chat=chat)
    agent = build_team(made, device="cpu").agents[0]
    (first, *_) = agents_at_hand(made, [])
    assert agent.encoder.chats == first.encoder.chats == (chat is True)
    assert first.encoder.form == load_encoder(made.agent_model, made.agent_model.name).form
    assert agent.encode(USER) == first.encoder.encode(USER)
    assert (agent.tokenizer.pad_token_id in agent.stop_ids) == (chat is True)


def test_a_generation_config_may_name_the_end(tmp_path):
    name = base_model(tmp_path)
    file = tmp_path / "generation_config.json"
    pad = tokenizer().pad_token_id
    file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": [EOS, pad]}))
    made = config(agent_model__name=name)
    assert build_team(made, device="cpu").agents[0].encoder.chats
    assert agents_at_hand(made, [])[0].encoder.chats


def test_chat_without_a_template_is_refused():
    made = config(agent_model__name=str(folder("llama")), agent_model__chat=True)
    for act in (lambda: build_team(made, device="cpu"), lambda: agents_at_hand(made, [])):
        with pytest.raises(UserError, match=r"^agent_model\.chat: "):
            act()


def test_arguments_reach_the_template():
    template = "{% if thinking %}<t>{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
    made = encoder(template, "<eos>", template_arguments={"thinking": True})
    assert made.tokenizer.decode(made.encode(USER)) == "<t>abc"


@pytest.mark.parametrize(
    ("template", "opens"),
    [
        (CHATML, False),
        (THINKS, True),
        (THINKS.replace("<think>\n", "<|think|>"), True),
        (THINKS.replace("<think>\n", "<think>\n\n</think>\n\n"), False),
    ],
)
def test_answers_are_not_begun_within_an_open_thought(template, opens, capsys) -> None:
    reader = encoder(template, "<|im_end|>", "<|im_start|>", "<|im_end|>")
    assert reader.opens_thought is opens
    _, work, _ = resolved(QUICKSTART, "prompts.style=dividing")
    row = {
        "prompt": "def f(x):\n",
        "test": "def check(candidate):\n    assert candidate(1) == 1\n",
        "entry_point": "f",
    }
    task = work.domain.task("T/0", row)
    capsys.readouterr()
    prompts = work.read_by([reader, reader]).prompts
    assert ("opens a thought" in capsys.readouterr().err) is opens
    (*_, last) = prompts.first_N(task, 2)[1]
    assert (prompts.prefill(task, 1, 2) == "") is opens
    assert (last.role == "user") is opens
    mine = Prompts(work.domain, {"prefill": "</think>def"}, [True], [True])
    assert mine.prefill(task, 0, 2) == "</think>def"
