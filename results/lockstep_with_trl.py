"""Two trainers in lockstep: TRL 1.16.0 trains this project's policy, and grpo.py follows it.

Read grpo.py first. A training loop can be wrong in ways that no unit test notices. The strongest
check is somebody else's loop. Here TRL's GRPOTrainer samples from the policy of agent.py and trains
it, in the gym of env.py. In each step, a twin gets the weights and Adam's state of TRL's policy.
Then rl_update of grpo.py trains the twin on the same 64 episodes, with the minibatches in the same
order. This compares

    episodes     ids and mask of TRL with a replay of the calls in a fresh environment: equal
    advantages   with the ones of grpo.py, with TRL's 1e-4 beside a deviation
    old logp     the log-probabilities of the sampled tokens under pi_old
    gradients    of every update: |difference| / |gradient|

If everything is equal, the two loops do the same from sampling to the update: the same words, the
same credit, the same gradient. Five things are made equal for this, because they differ on purpose:

    - The learning rate rises from step to step, as in grpo.py. The program that variants.py prints
      does this too.
    - A minibatch without any gradient makes no update, as in that program.
    - TRL shuffles a batch in the order that rl_update draws.
    - TRL's cispo divides each minibatch by its own number of tokens, not by their average.
    - The constant of dr_grpo is TRL's max_completion_length in both.

The twin is synchronised in each step, because rounding errors grow: after twenty steps the two
would be different policies.

It needs TRL. Nothing else in the project does:

    pip install torch==2.13.0 trl==1.16.0
    python results/lockstep_with_trl.py                 ten steps of four presets, some minutes
    python results/lockstep_with_trl.py --presets gspo --steps 80

Prints a table. TRL's seconds are those of its sampling and its updates (without a cache, which the
policy's wrapper does not have). The exit status is 1 if anything differs.
"""
import argparse
import copy
import math
import os
import random
import sys
import tempfile
import time
from unittest.mock import patch

os.environ.update(HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1")
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch
import torch.nn as nn
import trl.trainer.grpo_trainer as trl_module
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    PrinterCallback,
)
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput
from trl import GRPOConfig, GRPOTrainer

import grpo
from agent import (
    MAX_CALL_TOKENS,
    build_tokenizer,
    collate,
    decode,
    frozen_logps,
    make_rl_base,
    step_generator,
)
from env import TRAIN_TASKS, randomize_names
from variants import TRL, TRL_BASE, VARIANTS

PRESETS = ("default", "dr_grpo", "gspo", "cispo")
TOK = build_tokenizer()
PAD = len(TOK)                          # an id that the policy does not have
MAX_TOKENS = 512                        # of an episode with the tools' answers. None reaches it
NEWLINE = "<nl>"                        # the word "\n": TRL's tokenizer splits at white space
CLOSE = {"advantages": 1e-5, "old logp": 1e-5, "gradients": 1e-4}   # differences by rounding only


# ---- The policy, wrapped for transformers --------------------------------------------------------


class Config(PretrainedConfig):
    model_type = "bugfix_policy"


class Backbone(nn.Module):
    """The policy without its output layer. TRL pads on the left, which the policy can't."""

    def __init__(self, policy):
        super().__init__()
        self.policy = policy

    def forward(self, input_ids, attention_mask=None, **ignored):
        T = input_ids.shape[1]
        real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        earlier = torch.ones(T, T).tril().bool()                        # (T, T)
        itself = torch.eye(T).bool()                                    # or a pad would see nothing
        visible = earlier & real[:, None].bool() | itself               # (B, T, T)
        x = self.policy.words(input_ids.clamp(max=PAD - 1))
        for block in self.policy.blocks:
            x = attend(block, x, visible[:, None])
        return BaseModelOutput(last_hidden_state=self.policy.norm(x))


def attend(block, x, visible):
    """A Block of agent.py with another attention mask. It is written out, since Block has none."""
    B, T, D = x.shape
    qkv = block.qkv(block.norm1(x)).view(B, T, 3, block.heads, -1)
    q, k, v = qkv.permute(2, 0, 3, 1, 4)                                # (B, H, T, d) each
    seen = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)
    x = x + block.out(seen.transpose(1, 2).reshape(B, T, D))
    return x + block.down(nn.functional.gelu(block.up(block.norm2(x))))


class Model(PreTrainedModel, GenerationMixin):
    """TRL's loss calls base_model and lm_head, and its sampler calls forward."""

    config_class = Config
    base_model_prefix = "model"
    _tied_weights_keys = {"lm_head.weight": "model.policy.words.weight"}

    def __init__(self, config, policy):
        super().__init__(config)
        self.model = Backbone(policy)
        self.lm_head = nn.Linear(config.hidden_size, PAD, bias=False)
        self.lm_head.weight = policy.words.weight
        self.post_init()

    def _init_weights(self, module):
        pass

    def get_output_embeddings(self):
        return self.lm_head

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **ignored):
        return {"input_ids": input_ids, "attention_mask": attention_mask}

    def forward(self, input_ids, attention_mask=None, **ignored):
        hidden = self.model(input_ids, attention_mask).last_hidden_state
        return CausalLMOutput(logits=self.lm_head(hidden))


def wrap(policy):
    config = Config(
        vocab_size=PAD,
        hidden_size=policy.shape["width"],
        num_hidden_layers=policy.shape["layers"],
        num_attention_heads=policy.shape["heads"],
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        use_cache=False,
        eos_token_id=TOK["<end>"],
        pad_token_id=PAD,
    )
    return Model(config, policy)


# ---- The words -----------------------------------------------------------------------------------
# The template writes no <call>: the policy samples it, and TRL keeps the sampled ids.

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }} "
    "{% for t in m.tool_calls or [] %}{{ t.function.name }} {{ t.function.arguments }} "
    "{% endfor %}<end> {% else %}{{ m.content }} {% endif %}{% endfor %}"
)


def text_of(words):
    return " ".join(NEWLINE if word == "\n" else word for word in words)


class Words(PreTrainedTokenizerFast):
    """Every turn is a tool call, but submit is the model's last text."""

    def parse_response(self, ids, **ignored):
        words = decode(TOK, ids)
        if words[0] == "<call>" and words[-1] == "<end>":
            words = words[1:-1]
        if words == ["submit"]:
            return {"role": "assistant", "content": "submit"}
        function = {"name": "call", "arguments": {"words": text_of(words)}}
        call = {"type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}


def make_words():
    vocabulary = {text_of([word]): i for word, i in TOK.items()}
    vocabulary.update({"<pad>": PAD, "<unk>": PAD + 1})
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words = Words(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<end>",
        unk_token="<unk>",
        chat_template=TEMPLATE,
    )
    words.response_template = {}        # anything but None, and TRL calls parse_response
    return words


# ---- The gym, wrapped for TRL --------------------------------------------------------------------


class Gym:
    """An episode. TRL makes one for each attempt, and offers call to the policy as a tool."""

    rng = random.Random(0)

    def reset(self, task, **row):
        self.task = randomize_names(TRAIN_TASKS[task], self.rng)
        self.env = grpo.make_env(self.task, grpo.RLConfig(), self.rng)
        self.calls = []
        return text_of(self.env.reset())

    def call(self, words: str) -> str:
        """Makes one call.

        Args:
            words: its words.
        """
        call = ["\n" if word == NEWLINE else word for word in words.split()]
        self.calls.append(call)
        answer, done = self.env.step(call)
        return text_of(answer)


def reward(completions, environments, **ignored):
    """TRL does not make the last call of an episode, so it is made here."""
    for messages, gym in zip(completions, environments):
        calls = messages[-1].get("tool_calls")
        gym.call(calls[0]["function"]["arguments"]["words"] if calls else messages[-1]["content"])
    return [float(gym.env.passed) for gym in environments]


def replay(episode):
    """Plays the calls in a fresh environment. True if ids and mask are what it has to see."""
    ids = episode["ids"]
    env = grpo.make_env(episode["env"].task, grpo.RLConfig(), None)
    words = list(env.reset())
    mask = [0] * len(words)
    for call in episode["calls"]:
        turn = ids[len(words):len(words) + MAX_CALL_TOKENS]
        if TOK["<end>"] in turn:
            turn = turn[:turn.index(TOK["<end>"]) + 1]
        answer, done = env.step(call)
        words += decode(TOK, turn)
        mask += [1] * len(turn)
        if not done:                    # nobody reads the last answer
            words += answer
            mask += [0] * len(answer)
    return done and decode(TOK, ids) == words and episode["mask"] == mask


# ---- Both trainers -------------------------------------------------------------------------------


def reorder(tensors, order):
    """A dict of tensors with their rows in another order. Some entries have no rows."""
    moved = {}
    for key, x in tensors.items():
        moved[key] = x if x is None or x.dim() == 0 else x[order]
    return moved


def flat_gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


class Lockstep(GRPOTrainer):
    """TRL's trainer. Once it has sampled a step, rl_update trains the twin on the same step."""

    def follow(self, name):
        """Prepares the twin for a preset."""
        self.cfg = grpo.RLConfig(**VARIANTS[name])
        self.cfg.agg_constant = MAX_TOKENS              # read by the mode constant only
        self.twin = copy.deepcopy(self.model.model.policy)
        self.twin_optimizer = torch.optim.Adam(self.twin.parameters(), betas=(0.9, 0.95))
        self.twin_optimizer.register_step_pre_hook(self.keep_twin_gradient)
        self.twin_gradients = []        # of the updates of this step
        self.steps = 0
        self.updates = 0                # those that both made
        self.worst = dict.fromkeys(CLOSE, 0.0)
        self.rewards = []
        self.wrong_episodes = 0
        self.twin_seconds = 0.0

    def keep_twin_gradient(self, *ignored):
        self.twin_gradients.append(flat_gradient(self.twin))

    def differ(self, what, difference):
        self.worst[what] = max(self.worst[what], float(difference))

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        start = time.perf_counter()
        if self.twin_gradients:
            self.differ("gradients", math.inf)          # TRL made no update where the twin did
        episodes = self.episodes_of(batch)
        for episode in episodes:
            self.wrong_episodes += not replay(episode)
        self.compare_advantages(batch, episodes)
        self.synchronise()
        theirs = self.sampled(batch, batch["old_per_token_logps"])
        data = collate(episodes)
        ours, _ = frozen_logps(self.twin, data, self.cfg.temperature)
        self.differ("old logp", (ours[data["mask"]] - theirs).abs().max())

        # rl_update gets TRL's advantages, and TRL shuffles in the order of rl_update.
        order = torch.randperm(len(episodes), generator=step_generator(0, self.steps))
        trl_module.shuffle_sequence_dict = lambda tensors: reorder(tensors, order)
        rate = min(1, (self.steps + 1) / self.cfg.warmup_steps)
        self.twin_optimizer.param_groups[0]["lr"] = self.cfg.lr * rate
        generator = step_generator(0, self.steps)
        with patch("grpo.compute_advantages", return_value=batch["advantages"]):
            grpo.rl_update(self.twin, self.twin_optimizer, episodes, self.cfg, generator)
        self.steps += 1
        self.twin_seconds += time.perf_counter() - start
        return batch

    def sampled(self, batch, x):
        """The entries of x that belong to tokens that the policy sampled, episode by episode."""
        return x[(batch["completion_mask"] * batch["tool_mask"]).bool()]

    def episodes_of(self, batch):
        """TRL's batch as the episodes of agent.py."""
        episodes = []
        for i, gym in enumerate(self.environments):
            length = int(batch["completion_mask"][i].sum())
            prompt = batch["prompt_ids"][i][batch["prompt_mask"][i].bool()].tolist()
            ids = prompt + batch["completion_ids"][i, :length].tolist()
            episodes.append({
                "ids": ids,
                "mask": [0] * len(prompt) + batch["tool_mask"][i, :length].tolist(),
                "logps": [0.0] * len(ids),              # only a statistic needs the sampler's
                "calls": gym.calls,
                "env": gym.env,
                "reward": float(gym.env.passed),
            })
        return episodes

    def compare_advantages(self, batch, episodes):
        R = torch.tensor([episode["reward"] for episode in episodes])
        self.rewards.append(R.mean().item())
        ours = grpo.compute_advantages(episodes, self.cfg)
        if self.cfg.scale == "group_std":
            std = R.view(-1, self.cfg.group_size).std(dim=1)
            factor = (std + 1e-6) / (std + 1e-4)
            ours = ours * factor.repeat_interleave(self.cfg.group_size)
        self.differ("advantages", (ours - batch["advantages"]).abs().max())

    def synchronise(self):
        """The twin gets the weights and Adam's state of TRL's policy."""
        policy = self.model.model.policy
        self.twin.load_state_dict(policy.state_dict())
        for mine, theirs in zip(self.twin.parameters(), policy.parameters()):
            state = self.optimizer.optimizer.state.get(theirs, {})
            self.twin_optimizer.state[mine] = {key: x.clone() for key, x in state.items()}

    def training_step(self, *inputs):
        loss = super().training_step(*inputs)
        theirs = flat_gradient(self.model.model.policy)
        if not theirs.any():
            self.model.zero_grad(set_to_none=True)      # Adam skips a weight without a gradient
            return loss
        # The twin's gradient was kept after it was shortened to max_grad_norm.
        theirs *= min(1, self.cfg.max_grad_norm / (theirs.norm() + 1e-6))
        if self.twin_gradients:
            ours = self.twin_gradients.pop(0)
            self.differ("gradients", (ours - theirs).norm() / ours.norm())
            self.updates += 1
        else:
            self.differ("gradients", math.inf)          # the twin made no update here
        return loss

    def _compute_loss(self, model, inputs):
        if self.args.loss_type == "cispo":
            tokens = (inputs["completion_mask"] * inputs["tool_mask"]).sum()
            inputs["num_items_in_batch"] = tokens * self.args.steps_per_generation
        return super()._compute_loss(model, inputs)


def run(name, steps):
    """Trains with a preset for some steps. Returns the trainer, which knows what differed."""
    policy = make_rl_base(TOK)
    model = wrap(policy)
    cfg = grpo.RLConfig(**VARIANTS[name])
    fields = {**TRL_BASE, **TRL[name]}
    for key in ("verdict", "module", "trainer", "advantages", "penalty"):
        del fields[key]
    settings = GRPOConfig(
        **fields,
        num_generations=cfg.group_size,
        per_device_train_batch_size=cfg.prompts_per_step * cfg.group_size // cfg.minibatches,
        gradient_accumulation_steps=1,
        max_steps=steps * cfg.minibatches,
        max_grad_norm=cfg.max_grad_norm,
        temperature=cfg.temperature,
        max_completion_length=MAX_TOKENS,
        max_tool_calling_iterations=cfg.max_turns - 1,
        generation_kwargs={"max_new_tokens": MAX_CALL_TOKENS},
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        output_dir=tempfile.mkdtemp(),
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=cfg.lr, betas=(0.9, 0.95), weight_decay=0.0
    )
    warmup = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda n: min(1, (n // cfg.minibatches + 1) / cfg.warmup_steps)
    )
    prompt = [{"role": "user", "content": ""}]
    rows = [{"prompt": prompt, "task": i} for i in range(len(TRAIN_TASKS))]
    trainer = Lockstep(
        model=model,
        args=settings,
        train_dataset=Dataset.from_list(rows),
        reward_funcs=reward,
        processing_class=make_words(),
        environment_factory=Gym,
        optimizers=(optimizer, warmup),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.follow(name)
    start = time.perf_counter()
    trainer.train()
    trainer.seconds = time.perf_counter() - start - trainer.twin_seconds
    return trainer


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flag = parser.add_argument
    flag("--presets", nargs="+", choices=PRESETS, default=PRESETS, metavar="NAME")
    flag("--steps", type=int, default=10, metavar="N", help="of each preset")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    failed = False
    for name in args.presets:
        trainer = run(name, args.steps)
        equal = trainer.wrong_episodes == 0 and not trainer.twin_gradients
        for what, limit in CLOSE.items():
            equal = equal and trainer.worst[what] < limit
        failed = failed or not equal or trainer.updates == 0
        row = f"{name:9}{trainer.rewards[0]:5.2f} -> {trainer.rewards[-1]:.2f}"
        row += f"{trainer.seconds:13.1f}{trainer.wrong_episodes:16}{trainer.updates:9}"
        for what in CLOSE:
            row += f"{trainer.worst[what]:12.1e}"
        rows.append(row + ("  equal" if equal else "  DIFFERENT"))
    print("\nlargest difference between TRL and grpo.py")
    print("preset    mean reward  TRL's seconds  wrong episodes  updates  "
          "advantages    old logp   gradients")
    print("\n".join(rows))
    sys.exit(failed)


if __name__ == "__main__":
    main()
