"""Vision encoders: parameters, time, memory, proofs, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from milpplan import Layout, Problem, simulate
from milpplan.cli.app import app
from milpplan.communication.wires import end_messages
from milpplan.errors import IllegalPlanError, InvalidInputError
from milpplan.launchers import restrict
from milpplan.problem import DenseMlp, GroupedQueryAttention, LayerRun, Projector, VisionEncoder
from milpplan.problem.huggingface import model_from_config
from milpplan.simulation import LayoutColumns
from milpplan.simulation.layers import (
    Part,
    Phase,
    embedding_endpoint,
    head_endpoint,
    mfu,
    total_parameters,
    trained_parameters,
)
from milpplan.simulation.layout_costs import layout_costs
from milpplan.switching.ownership import model_tensors
from milpplan.validation import used_terms
from tests.amounts import long_but
from tests.communication.test_messages import free_of_contention, seconds
from tests.consumers import assert_consumers_agree
from tests.optimize.problems import random_problem
from tests.optimize.test_optimality import BACKENDS, check
from tests.simulation.cases import even_plan, ideal_hardware, problem_of, random_layout
from tests.simulation.cases import random_problem as real_problem
from tests.simulation.test_bulk import switched, with_host

DATA = Path(__file__).parents[1] / "data"
QWEN_ENCODER = 576_388_336
"""``model.visual`` of Qwen3-VL 8B and 235B in transformers 5.24.0: patches 1,770,624, positions 2,654,208, layers
411,466,608, mergers 40,119,040 and 120,377,856."""


LLAMA4_ENCODER = 850_960_896
"""``Llama4VisionModel`` of Llama 4 in transformers 5.24.0."""


def with_images(problem: Problem, rng: np.random.Generator) -> Problem:
    """The problem with a small encoder and images in up to all of a sequence."""
    hidden, heads = 64 * int(rng.integers(1, 5)), int(rng.choice([1, 2, 3, 4]))
    attention = GroupedQueryAttention(
        num_attention_heads=heads, num_key_value_heads=heads, head_dim=64, qkv_bias=True
    )
    layer = LayerRun(
        count=int(rng.integers(1, 9)), attention=attention, mlp=DenseMlp(intermediate_size=4 * hidden)
    )
    width = problem.model.hidden_size
    projectors = [
        Projector(widths=(4 * hidden, width)),
        Projector(widths=(4 * hidden, 256, width), bias=True, count=2),
        Projector(widths=(hidden, 128, width), of_patches=True),
    ]
    vision = VisionEncoder(
        hidden_size=hidden,
        layers=(layer,),
        patch_inputs=588,
        patches_per_token=4,
        projectors=tuple(projectors[: int(rng.integers(1, 4))]),
        other_parameters=1000,
    )
    tokens = int(rng.integers(1, problem.job.sequence_length + 1))
    job: dict[str, Any] = {"vision_tokens": tokens, "image_tokens": int(rng.integers(1, tokens + 1))}
    if problem.job.lora is None and rng.integers(3) == 0:
        job["frozen"] = ("vision", *problem.job.frozen)
    model = problem.model.model_copy(update={"vision": vision})
    space = problem.space.model_copy(update={"vision_data_parallel": (False, True)})
    changes = {"model": model, "job": problem.job.model_copy(update=job), "space": space}
    return Problem.model_validate(dict(problem) | changes)


def with_sharing(random: np.random.Generator, problem: Problem, layout: Layout) -> Layout:
    """The layout with switches of its own, those of the encoder included."""
    again, shared = (
        problem.recomputes_vision and random.integers(2) == 0,
        layout.cp > 1 and random.integers(2) == 0,
    )
    changes = {"recompute_vision": bool(again), "vision_data_parallel": bool(shared)}
    return switched(random, problem, layout).model_copy(update=changes)


def qwen(vision_tokens: int, **job: Any) -> Problem:
    """Qwen3-VL 8B at peak everywhere."""
    return problem_of("qwen3-vl-8b", ideal_hardware(), vision_tokens=vision_tokens, **job)


def end_of(problem: Problem, **layout: Any) -> Any:
    """The embedding with its encoder in one layout."""
    return embedding_endpoint(problem, LayoutColumns.of([Layout(**{"global_batch_size": 64} | layout)]))


@pytest.mark.parametrize(("name", "count"), [("qwen3-vl-8b", 8_767_123_696), ("qwen3-vl-30b-a3b", 31_070_754_032)])
def test_qwen3_vl_counts_as_its_class(name: str, count: int) -> None:
    """Configs as on the Hub have, with their encoder, the parameters of the transformers class."""
    config = json.loads((DATA / "hf_configs" / f"{name}.json").read_text())
    assert total_parameters(model_from_config(config, name)) == count


@pytest.mark.parametrize(
    ("outer", "vision", "encoder"),
    [
        # Of transformers 5.24.0: the vision tower and projector of Kimi-K2.5 and of Gemma 3 4B, on Llama's layers.
        (
            "kimi_k25",
            {
                "vt_hidden_size": 1152, "vt_intermediate_size": 4304, "vt_num_attention_heads": 16,
                "vt_num_hidden_layers": 27, "patch_size": 14, "init_pos_emb_height": 64, "init_pos_emb_width": 64,
                "merge_kernel_size": [2, 2], "mm_hidden_size": 1152,
            },
            5_397_120 + 411_466_608 + 2_304 + 2_304 + 21_238_272 + (4_608 + 1) * 2_560,
        ),
        (
            "gemma3",
            {
                "hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16, "num_hidden_layers": 27,
                "patch_size": 14, "image_size": 896, "model_type": "siglip_vision_model",
            },
            419_816_304,
        ),
        # The tile encoder of Llama 4 and the encoder of Gemma 4 26B in transformers 5.24.0, without the projection
        # to their own text widths.
        (
            "llama4",
            {
                "hidden_size": 1408, "intermediate_size": 5632, "num_attention_heads": 16, "num_hidden_layers": 34,
                "patch_size": 14, "image_size": 336, "pixel_shuffle_ratio": 0.5, "projector_input_dim": 4096,
                "projector_output_dim": 4096, "vision_output_dim": 4096, "num_channels": 3, "norm_eps": 1e-5,
                "vision_feature_layer": -1, "vision_feature_select_strategy": "default", "rope_theta": 10000,
            },
            LLAMA4_ENCODER + 4096 * 2560,
        ),
        (
            "gemma4",
            {
                "hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16, "num_hidden_layers": 27,
                "head_dim": 72, "patch_size": 16, "pooling_kernel_size": 3, "position_embedding_size": 10240,
                "default_output_length": 280, "chunk_size_feed_forward": 0, "model_type": "gemma4_vision",
                "image_seq_length": 280, "video_seq_length": 70, "standardize": True,
            },
            25_805_933_872 - 25_233_141_760 - 1152 * 2816 + 1152 * 2560,
        ),
    ],
)  # fmt: skip
def test_other_encoders_count_as_their_classes(outer: str, vision: dict[str, Any], encoder: int) -> None:
    """The encoders of Kimi-K2.5, Gemma 3, Gemma 4 and Llama 4, before a language model of width 2,560."""
    text = {
        "model_type": "llama", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 2,
        "num_attention_heads": 8, "vocab_size": 1000, "max_position_embeddings": 4096,
        "num_key_value_heads": 8, "head_dim": 320, "tie_word_embeddings": False,
    }  # fmt: skip
    config = {"model_type": outer, "text_config": text, "vision_config": vision, "mm_tokens_per_image": 256}
    model = model_from_config(config, "m")
    assert total_parameters(model) - total_parameters(model_from_config(config, "m", ["vision_config"])) == encoder
    with pytest.raises(InvalidInputError, match="'depths' not understood"):
        model_from_config(config | {"vision_config": vision | {"depths": 3}}, "m")
    del config["vision_config"]["patch_size"]
    with pytest.raises(InvalidInputError, match="patch_size is missing"):
        model_from_config(config, "m")


def test_encoder_without_images_has_states_alone() -> None:
    """With no image tokens the step takes as long as without the encoder, but for its states; a frozen encoder has
    weights alone."""
    problem = qwen(0)
    text = problem.model_copy(update={"model": problem.model.model_copy(update={"vision": None})})
    columns = LayoutColumns.of([Layout(global_batch_size=1)])
    idle, bare = (layout_costs(case, columns).at(0) for case in (problem, text))
    for name in ("embedding_ns", "embedding_kept_bytes", "embedding_workspace_bytes", "duration_ns", "kept_bytes"):
        assert (getattr(idle, name) == getattr(bare, name)).all()
    assert (idle.state_bytes - bare.state_bytes)[:, -2].tolist() == [n * QWEN_ENCODER for n in (2, 4, 12)]
    frozen = layout_costs(qwen(0, frozen=("vision",)), columns).at(0)
    assert (frozen.state_bytes - bare.state_bytes)[:, -2].tolist() == [2 * QWEN_ENCODER, 0, 0]
    assert trained_parameters(problem) - trained_parameters(qwen(0, frozen=("vision",))) == QWEN_ENCODER


def test_time_is_linear_in_tokens_apart_from_attention() -> None:
    """At peak everywhere, 2 FLOPs a weight and patch or token forwards, 4 backwards (2 of the patches' product),
    beside attention to all patches of an image."""
    peak = ideal_hardware().accelerator.bf16.peak_flops_per_s
    embedding = end_of(qwen(0)).seconds[Part.COMPUTE, :, 0]

    def flops(tokens: int, image: int) -> np.ndarray[Any, Any]:
        case = qwen(tokens, image_tokens=image)
        return (end_of(case).seconds[Part.COMPUTE, :, 0] - embedding) * peak

    matrices = 27 * (4 * 1152 * 1152 + 2 * 1152 * 4304)
    merger = 4 * 4608 * (4608 + 4096)
    patch = 1536 * 1152
    core = 27 * 4 * 1152 * (4 * 64)
    linear = 64 * np.array([2 * (4 * (matrices + patch) + merger), 4 * (4 * matrices + merger) + 2 * 4 * patch])
    assert flops(64, 64) == pytest.approx(linear + 64 * 4 * core * np.array([1, 2.5]), rel=1e-6)
    assert flops(1024, 64) == pytest.approx(16 * flops(64, 64), rel=1e-6)
    assert flops(1024, 256) - flops(1024, 64) == pytest.approx(1024 * 4 * core * 3 * np.array([1, 2.5]), rel=1e-6)


def test_recomputation_and_freezing_of_the_encoder() -> None:
    """Recomputation adds a forward of the layers and leaves their inputs; a frozen encoder has no backward and
    keeps nothing; every context-parallel rank computes all images."""
    problem = qwen(1024)
    plain, again = end_of(problem), end_of(problem, recompute_vision=True)
    added = (again.seconds - plain.seconds)[Part.COMPUTE, :, 0]
    assert added[Phase.FORWARD] == 0
    assert 0.8 * plain.seconds[Part.COMPUTE, 0, 0] < added[Phase.BACKWARD] < plain.seconds[Part.COMPUTE, 0, 0]
    kept = again.kept_bytes - 24 * problem.job.sequence_length
    outside = 2 * 4096 * 1536 + 4 * 2 * 1024 * 4 * 4608
    assert kept == 27 * 2 * 4096 * 1152 + outside
    assert again.kept_bytes < plain.kept_bytes
    assert again.workspace_bytes > plain.workspace_bytes
    frozen = end_of(qwen(1024, frozen=("vision", "embedding")))
    assert (frozen.seconds[:, Phase.BACKWARD] == 0).all()
    assert frozen.kept_bytes == 24 * problem.job.sequence_length
    split = end_of(problem, cp=2).seconds - end_of(qwen(0), cp=2).seconds
    assert split == pytest.approx(plain.seconds - end_of(qwen(0)).seconds)


def test_ranks_that_share_images_wait_for_the_one_with_the_most() -> None:
    """Four images on two ranks: half of the work and the activations; on eight ranks no less than one image each.
    The embeddings (four projectors, four images) are gathered, and their gradients summed, also if the encoder is
    frozen."""
    text = qwen(0)

    def encoder(cp: int, shared: bool, **job: Any) -> tuple[Any, Any]:
        problem = qwen(1024, image_tokens=256, **job)
        ends = end_of(problem, cp=cp, vision_data_parallel=shared), end_of(text, cp=cp)
        return ends[0].seconds - ends[1].seconds, ends[0].kept_bytes - ends[1].kept_bytes

    whole, kept = encoder(2, shared=False)
    gathered = 4 * 1024 * 4096 * 2
    peak = ideal_hardware().accelerator.memory_bandwidth_bytes_per_s
    for cp, share in ((2, 2), (4, 4), (8, 4)):
        seconds, own = encoder(cp, shared=True)
        # Copied together, and the other ranks' into the embedding and, of their gradients, out of it.
        others = 1 - 1 / share
        copies = 2 * gathered / peak * np.array([1 + others, others])
        assert seconds[Part.COMPUTE, :, 0] == pytest.approx(whole[Part.COMPUTE, :, 0] / share + copies, rel=1e-9)
        assert own == kept / share
        assert seconds[Part.CP].min() > 0
    frozen, _ = encoder(2, shared=True, frozen=("vision", "embedding"))
    assert frozen[Part.CP, Phase.BACKWARD] == encoder(2, shared=True)[0][Part.CP, Phase.BACKWARD]
    assert encoder(2, shared=True)[0][Part.CP, Phase.FORWARD] > whole[Part.CP, Phase.FORWARD]


def test_tensor_parallelism_divides_where_heads_divide() -> None:
    """Of 16 heads 8 ranks take two each; of 12 ranks every rank computes all, without any message."""
    problem, text = qwen(1024), qwen(0)
    divided = end_of(problem, tp=8).seconds - end_of(text, tp=8).seconds
    whole = end_of(problem, tp=12).seconds - end_of(text, tp=12).seconds
    alone = end_of(problem).seconds - end_of(text).seconds
    assert divided[Part.TP].min() > 0
    assert divided[Part.COMPUTE, 0] < alone[Part.COMPUTE, 0] / 6
    assert whole == pytest.approx(alone)


@pytest.mark.parametrize("seed", long_but(range(4), range(40)))
def test_messages_take_the_time_of_the_encoder(seed: int) -> None:
    """The times of the counted messages at the first stage, added up, are those of embedding and encoder, exposed
    and hidden, with any order of ranks."""
    random = np.random.default_rng(seed)
    problem = with_images(free_of_contention(real_problem(random)), random)
    layout = with_sharing(random, problem, random_layout(random, problem))
    if layout.vision_data_parallel:
        # Every rank has as many images, of which the time is that of the rank with the most.
        size = 2 * layout.cp * layout.micro_batch_size
        images = {"vision_tokens": size * (problem.job.vision_tokens // size), "image_tokens": 2}
        problem = problem.model_copy(update={"job": problem.job.model_copy(update=images)})
    columns = LayoutColumns.of([layout])
    parts = [Part.TP, Part.TP_HIDDEN, Part.CP]
    priced = embedding_endpoint(problem, columns).seconds[parts, :, 0].sum(axis=0)
    messages = end_messages(problem, False, columns)
    for phase, calls in ((Phase.FORWARD, "forward"), (Phase.BACKWARD, "backward")):
        took = sum(getattr(m, calls)[0] * seconds(problem, columns, m) for m in messages)
        assert took == pytest.approx(priced[phase], rel=1e-9)


def test_utilisation_counts_the_images() -> None:
    """MFU has the encoder's FLOPs, a third of them where it is frozen."""
    shares = [mfu(case, 1.0, 8) - mfu(qwen(0), 1.0, 8) for case in (qwen(1024), qwen(1024, frozen=("vision",)))]
    peak = 8 * ideal_hardware().accelerator.bf16.peak_flops_per_s
    layers = 411_466_608 + 1536 * 1152 + 27 * 2 * 16 * 72 * 4096
    forward = 2 * 1024 * (4 * layers + 4 * 4608 * (4608 + 4096))
    assert shares == pytest.approx([3 * forward / 4096 / peak, forward / 4096 / peak])


def test_layers_of_further_tokens_look_up_text_alone() -> None:
    """The last stage, with a layer of multi-token prediction, has the time, memory and messages of a job without
    images."""
    columns = LayoutColumns.of([Layout(tp=2, global_batch_size=1)])
    idle, seen = (qwen(tokens, mtp_layers=1) for tokens in (0, 1024))
    heads = [head_endpoint(case, columns) for case in (idle, seen)]
    for name in ("seconds", "kept_bytes", "workspace_bytes"):
        np.testing.assert_array_equal(*(getattr(head, name) for head in heads))
    sent = [[message.num_bytes[0] for message in end_messages(case, True, columns)] for case in (idle, seen)]
    assert sent[0] == sent[1]


@pytest.mark.parametrize("seed", long_but((0,), range(20)))
def test_bulk_bounds_and_traffic_know_images(seed: int) -> None:
    """Bulk simulation gives the simulator's numbers, bounds hold for random plans, and traffic adds up."""
    random = np.random.default_rng(seed)
    problem = with_images(with_host(real_problem(random)), random)
    layouts = [with_sharing(random, problem, random_layout(random, problem)) for _ in range(12)]
    assert_consumers_agree(problem, layouts, random)


@pytest.mark.parametrize("backend", long_but(("highs",), BACKENDS))
@pytest.mark.parametrize("count", long_but((2,), (2, 20)))
def test_optimum_with_images_is_that_of_brute_force(backend: str, count: int) -> None:
    """Random problems with images, on every backend."""
    first = 52_000 + 100 * BACKENDS.index(backend)
    for seed in range(first, first + count):
        check(with_images(random_problem(seed), np.random.default_rng(seed)), backend)


@pytest.mark.parametrize(
    ("model", "job", "seen"),
    [
        ("llama3-8b", {"vision_tokens": 8}, "llama3-8b has no vision encoder"),
        ("llama3-8b", {"frozen": ("vision",)}, "llama3-8b has no vision encoder"),
        ("qwen3-vl-8b", {"vision_tokens": 5000}, "vision_tokens=5000 exceeds sequence_length=4096"),
    ],
)
def test_nonsense_is_refused(model: str, job: dict[str, Any], seen: str) -> None:
    """A job that contradicts itself or the model says so."""
    with pytest.raises(ValueError, match=seen):
        problem_of(model, "dgx-h100", **job)


@pytest.mark.long
def test_the_command_line_answers_with_evidence(tmp_path: Path) -> None:
    """A solve with images names them and the part that no measured run covers; without images it says so."""
    file = tmp_path / "plan.json"
    words = ["solve", "qwen3-vl-8b", "dgx-h100", "--gpus", "8", "--global-batch", "16", "--fix", "pp=1,cp=1,tp=1"]
    words += ["--space", "uniform", "--out", str(file), "--verbose"]
    idle = CliRunner().invoke(app, words)
    assert "no images: the vision encoder is idle" in " ".join(idle.output.split())
    answer = CliRunner().invoke(app, [*words, "--vision-tokens", "1024", "--image-tokens", "256"])
    assert answer.exit_code == 0
    text = " ".join(answer.output.split())
    assert "1,024 image tokens a sequence in images of 256 tokens" in text
    assert "a vision encoder on the first stage" in text
    assert json.loads(file.read_text())["problem"]["job"]["vision_tokens"] == 1024
    refused = CliRunner().invoke(app, ["export", str(file), "--to", "torchtitan"])
    assert refused.exit_code == 2
    assert "qwen3-vl-8b has a vision encoder" in " ".join(refused.output.split())


def test_launchers_switches_and_terms_name_the_encoder() -> None:
    """Targets and switches refuse models with an encoder, and plans have its term only with images."""
    problem = problem_of("qwen3-vl-8b", "dgx-h100", num_gpus=8, global_batch_size=8, vision_tokens=512)
    with pytest.raises(IllegalPlanError, match="qwen3-vl-8b has a vision encoder"):
        restrict(problem, "megatron-bridge")
    with pytest.raises(InvalidInputError, match="qwen3-vl-8b has a vision encoder"):
        model_tensors(problem.model)
    idle = problem.model_copy(update={"job": problem.job.model_copy(update={"vision_tokens": 0})})
    plan = even_plan(problem, Layout(dp=8, global_batch_size=8))
    names = [{term.name for term in used_terms(case, plan)} for case in (idle, problem)]
    assert names[1] - names[0] == {"vision_encoder"}
    assert simulate(idle, plan).step_time_s < simulate(problem, plan).step_time_s


def test_a_projector_of_patches_works_before_they_merge() -> None:
    """MiniMax-M3's first projector takes patches, and so costs four times that of its tokens."""
    problem = qwen(4096, image_tokens=1024)
    vision = problem.model.vision
    assert vision is not None
    forwards = []
    for projectors in ((), (False,), (True,)):
        more = tuple(Projector(widths=(1152, 6144, 4096), of_patches=one) for one in projectors)
        changed = vision.model_copy(update={"projectors": (*vision.projectors, *more)})
        other = problem.model_copy(update={"model": problem.model.model_copy(update={"vision": changed})})
        forwards.append(end_of(other).seconds[Part.COMPUTE, Phase.FORWARD, 0])
    tokens, patches = (forwards[1] - forwards[0]) * 312e12, (forwards[2] - forwards[0]) * 312e12
    assert tokens == pytest.approx(2 * 4096 * (1152 + 4096) * 6144, rel=0.01)
    assert patches == pytest.approx(4 * tokens, rel=1e-6)
