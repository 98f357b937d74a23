"""Predictions of training on many GPUs against hand-worked numbers, the bytes of real tensors and textbook formulas."""

from __future__ import annotations

import json
from math import prod
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

from regard.cli.cost_commands import cost
from regard.config import ModelConfig, TrainConfig
from regard.device import PEAK_FLOPS
from regard.errors import RegardError
from regard.models.analysis.cost import Cost, side_lengths, training_memory
from regard.models.analysis.gpu_cluster import EFFICIENCY, GB, GPUS, Cluster, MeshShape, make_cluster, parse_mesh
from regard.models.analysis.scaling import PHASES, Communication, ScalingPlanner, StepPrediction, Workload, meshes_of
from regard.models.architectures import make_model, preset, resolve
from regard.training.optimizer import make_optimizer
from regard.training.stochastic_rounding import weights_to_bf16

# Two blocks of width 8 with two heads of 4 and an inner width of 16; 64 tokens, whose matrix is tied.
SIZES = {"n_decoder_layers": 2, "d_model": 8, "n_heads": 2, "d_ff": 16, "max_len": 16, "target_vocab": 64}
WORKSPACES = 4 * (32 << 20)
ONE = MeshShape()


def tiny(**settings: Any) -> ModelConfig:
    return resolve(preset("gpt-tiny", **{**SIZES, "positions": "sinusoidal", "dropout": 0.0, **settings}))


def translator(**settings: Any) -> ModelConfig:
    sizes = {**SIZES, "n_encoder_layers": 1, "n_decoder_layers": 1, "source_vocab": 64, "dropout": 0.0, **settings}
    return resolve(preset("transformer-tiny", **sizes))


def planner(config: ModelConfig, **cluster: Any) -> ScalingPlanner:
    return ScalingPlanner(config, make_cluster(**cluster))


def predict(config: ModelConfig, mesh: MeshShape, batch: int, length: int = 4, **work: Any) -> StepPrediction:
    given = {"accumulate": 1, "activation_checkpointing": False, **work}
    return planner(config).predict(mesh, Workload(length, batch, **given))


def filled(**parts: int) -> dict[str, int]:
    """All parts of a phase; those that are not given are 0."""
    names = ("weights", "moments", "gradients", "bf16 copies", "gathered", "activations", "logits", "working")
    return {name: parts.get(name.replace(" ", "_"), 0) for name in names} | {"workspaces": WORKSPACES}


# ---- by hand -----------------------------------------------------------------------------------------------------------

# A block: qkv 24 x 8 + 24, out 8 x 8 + 8, inner 16 x 8 + 16, outer 8 x 16 + 8, two norms of 8 + 8.
BLOCK = (192 + 24) + (64 + 8) + (128 + 16) + (128 + 8) + 32
OUTSIDE = 64 * 8 + 16  # the embedding, and the last norm
ALL = 2 * BLOCK + OUTSIDE


def test_the_tiny_model_has_the_parameters_of_the_hand_worked_numbers() -> None:
    assert (BLOCK, OUTSIDE, ALL) == (600, 528, 1728)
    assert Cost(tiny()).parameters == ALL


def test_memory_of_one_gpu_by_hand() -> None:
    # 3 rows of 4 tokens. A token of a block keeps the sum and the norm (32), q, k, v (48), the output of attention (16),
    # again a sum and a norm (32), and the inner layer after relu (32); behind the blocks, the last sum and norm (32).
    found = predict(tiny(), ONE, 3).memory
    state = {"weights": 4 * 1728, "moments": 8 * 1728}
    block, tokens = 160, 12
    activations = tokens * (2 * block + 32)
    copies = 2 * 2 * (192 + 64 + 128 + 128)  # of two blocks
    head, hidden = 512, tokens * 8 * 2
    backward = 2 * hidden + tokens * 4 * 16  # of the residual stream, and around relu
    assert list(found) == list(PHASES)
    assert found["loss"] == filled(
        **state,
        bf16_copies=copies + 2 * head,
        activations=activations,
        logits=2 * tokens * 64,
        working=4 * head + hidden,
    )
    assert found["loss gradient"] == filled(
        **state, gradients=4 * head, bf16_copies=copies, activations=activations, working=4 * head + 2 * hidden
    )
    assert found["backward begins"] == filled(
        **state, gradients=4 * head, bf16_copies=copies, activations=activations, working=backward
    )
    assert found["backward ends"] == filled(
        **state,
        gradients=4 * (512 + 16 + BLOCK),  # not yet those of the first block
        bf16_copies=copies // 2,
        activations=tokens * (block + 32),
        working=backward,
    )
    assert found["embedding gradient"] == filled(**state, gradients=4 * 1728, working=4 * head + 3 * hidden)
    assert found["update"] == filled(**state, gradients=4 * 1728)


def test_embeddings_that_are_not_tied_have_their_gradient_last() -> None:
    found = predict(tiny(tie="none"), ONE, 3).memory
    assert found["update"]["gradients"] == 4 * (ALL + 512)
    assert found["backward ends"]["gradients"] == 4 * (512 + 16 + BLOCK)
    assert found["embedding gradient"]["gradients"] == 4 * (ALL + 512)
    assert found["embedding gradient"]["working"] == 3 * 12 * 16  # no second gradient of the same matrix


def test_activation_checkpointing_keeps_the_inputs_of_blocks_and_one_block_at_a_time() -> None:
    found = predict(tiny(), ONE, 3, activation_checkpointing=True).memory
    tokens, block = 12, 160
    kept = tokens * (2 * 2 * 16 + 32)  # x and y of each block, and the ends of the stack
    assert found["loss"]["activations"] == kept
    assert found["loss"]["bf16 copies"] == 2 * 512  # of the output matrix alone
    assert found["backward begins"]["activations"] == kept + tokens * block
    assert found["backward begins"]["bf16 copies"] == 2 * 512  # of the last block's matrices


def test_memory_of_a_rank_of_two_shards_and_two_tensor_parallel_ranks_by_hand() -> None:
    # Column matrices and their biases are halved, row matrices too; the biases behind them and norms are not.
    block = (96 + 12) + (32 + 8) + (64 + 8) + (64 + 8) + 32
    assert block == 324
    kept = (2 * block + OUTSIDE) // 2
    found = predict(tiny(), MeshShape(1, 2, 2), 6).memory  # 3 rows a rank
    state = {"weights": 4 * kept, "moments": 8 * kept}
    # A token keeps of its one head q, k, v (24) and the output (8), and half of the inner layer (16).
    tokens, activations, hidden = 12, 12 * (2 * (32 + 24 + 8 + 32 + 16) + 32), 12 * 16
    gathered = 2 * (OUTSIDE + 2 * block)
    backward = 2 * hidden + tokens * 4 * 8 + 6 * block  # and the gradients of a block, in bf16 and fp32
    assert found["loss"] == filled(
        **state,
        gathered=gathered,
        activations=activations,
        logits=2 * tokens * 64,
        working=4 * 512 + hidden,
    )
    assert found["backward begins"] == filled(
        **state, gradients=2 * 512, gathered=gathered, activations=activations, working=backward
    )
    assert found["backward ends"] == filled(
        **state,
        gradients=4 * block // 2 + 2 * OUTSIDE,  # of the last block's shard, and in bf16 what is outside of blocks
        gathered=gathered,
        activations=tokens * (112 + 32),
        working=backward,
    )
    assert found["embedding gradient"] == filled(
        **state,
        gradients=4 * block + 2 * OUTSIDE,
        gathered=2 * OUTSIDE,
        working=2 * 512 + 3 * hidden + 4 * OUTSIDE,
    )
    assert found["update"] == filled(**state, gradients=4 * kept)


def sent(found: StepPrediction) -> dict[str, int]:
    return {f"{one.axis} {one.operation}": one.sent for one in found.communication}


def test_communication_by_hand() -> None:
    assert sent(predict(tiny(), ONE, 1)) == {}
    # DDP: all gradients in fp32, 2 (n-1)/n.
    assert sent(predict(tiny(), MeshShape(4), 4)) == {"data all-reduce": 2 * 3 * 4 * ALL // 4}
    # FSDP: blocks twice and the rest once in bf16; gradients in fp32.
    shards = sent(predict(tiny(), MeshShape(1, 4), 4))
    assert shards == {
        "shard all-gather": 3 * 2 * (2 * 2 * BLOCK + OUTSIDE) // 4,
        "shard reduce-scatter": 3 * 4 * ALL // 4,
    }
    # HSDP: also the gradients of the rank's shard.
    assert sent(predict(tiny(), MeshShape(2, 4), 8)) == {"data all-reduce": 2 * 4 * (ALL // 4) // 2, **shards}
    # Tensor parallelism: in each block two all-reduces forward and two backward, of 4 tokens of 8 numbers in bf16.
    assert sent(predict(tiny(), MeshShape(1, 1, 2), 1)) == {"tensor all-reduce": 2 * 4 * (4 * 8 * 2)}
    again = predict(tiny(), MeshShape(1, 1, 2), 1, activation_checkpointing=True)
    assert sent(again) == {"tensor all-reduce": 2 * 6 * (4 * 8 * 2)}


def test_cross_attention_is_reduced_over_tensor_ranks_for_source_and_target() -> None:
    # Encoder: 2 sublayers, forward and backward. Decoder: 3 forward; backward 3, and the gradient of the encoder's output.
    found = sent(predict(translator(), MeshShape(1, 1, 2), 1))
    assert found == {"tensor all-reduce": (4 + 3 + 4) * (4 * 8 * 2)}


def test_accumulation_repeats_what_shards_send_and_not_the_sum_over_data() -> None:
    once = sent(predict(tiny(), MeshShape(2, 2), 12))
    thrice = sent(predict(tiny(), MeshShape(2, 2), 12, accumulate=3))
    assert thrice == {
        "data all-reduce": once["data all-reduce"],
        "shard all-gather": 3 * once["shard all-gather"],
        "shard reduce-scatter": 3 * once["shard reduce-scatter"],
    }


def test_gradients_keep_their_memory_in_buckets_of_ddp_and_under_accumulation() -> None:
    assert predict(tiny(), ONE, 3).memory["loss"]["gradients"] == 0
    assert predict(tiny(), MeshShape(3), 3).memory["loss"]["gradients"] == 4 * ALL
    assert predict(tiny(), ONE, 3, accumulate=3).memory["loss"]["gradients"] == 4 * ALL
    assert predict(tiny(), MeshShape(1, 2), 4, accumulate=2).memory["loss"]["gradients"] == 4 * ALL // 2


# ---- time --------------------------------------------------------------------------------------------------------------


def test_one_gpu_reaches_the_efficiency_that_is_assumed() -> None:
    found = predict(tiny(), ONE, 5)
    flops = 3 * Cost(tiny()).forward_flops(5, 0, 4)
    assert found.seconds == pytest.approx(flops / (EFFICIENCY * PEAK_FLOPS["H200"]))
    assert found.mfu == pytest.approx(EFFICIENCY)
    assert found.tokens_per_second == pytest.approx(20 / found.seconds)
    recomputed = predict(tiny(), ONE, 5, activation_checkpointing=True)
    assert recomputed.seconds == pytest.approx(4 / 3 * found.seconds)
    assert recomputed.mfu == pytest.approx(3 / 4 * EFFICIENCY)


def test_tensor_parallelism_divides_the_blocks_and_repeats_the_logits() -> None:
    whole = Cost(tiny()).forward_flops(1, 0, 4)
    logits = 2 * 4 * 8 * 64
    found = predict(tiny(), MeshShape(1, 1, 2), 1)
    expected = 3 * ((whole - logits) / 2 + logits) / (EFFICIENCY * PEAK_FLOPS["H200"])
    assert found.computing == pytest.approx(expected)


def cluster(**changed: Any) -> Cluster:
    return make_cluster(**{"gpus_per_node": 8, "bandwidth": 400e9, "network": 50e9, **changed})


def test_a_group_across_nodes_has_the_network_adapters_of_its_members_in_one_node() -> None:
    nodes = cluster()
    assert nodes.group_bandwidth(8, 1) == nodes.group_bandwidth(4, 2) == 400e9  # in one node
    assert nodes.group_bandwidth(16, 1) == 400e9  # 8 x 50
    assert nodes.group_bandwidth(16, 2) == 200e9  # 4 members in each node
    assert nodes.group_bandwidth(4, 8) == nodes.group_bandwidth(4, 64) == 50e9  # one
    assert cluster(network=100e9).group_bandwidth(16, 1) == 400e9  # its links are the limit
    assert cluster(gpus_per_node=1).group_bandwidth(2, 1) == 50e9


def test_latency_counts_the_hops_of_a_ring_or_of_a_tree() -> None:
    nodes = cluster()
    assert nodes.latency(8, 1, "all-gather") == pytest.approx(7 * 3.4e-6)
    assert nodes.latency(16, 1, "reduce-scatter") == pytest.approx(14 * 3.4e-6 + 14e-6)
    assert nodes.latency(4, 8, "all-gather") == pytest.approx(3 * 14e-6)
    assert nodes.latency(32, 1, "all-reduce") == pytest.approx(2 * (7 * 3.4e-6 + 2 * 14e-6))


def of_axis(found: StepPrediction, axis: str) -> list[Communication]:
    return [one for one in found.communication if one.axis == axis]


def test_communication_hides_behind_computing_and_that_of_tensor_ranks_does_not() -> None:
    config = resolve(preset("gpt2"))
    work = Workload(1024, 64, 1, False)
    # DDP: the gradients of the embeddings, 4 bytes of 50,257 x 768 numbers, are ready last, after the backward pass.
    fast, slow = (planner(config, network=n).predict(MeshShape(16), work) for n in (50e9, 1e8))
    last = 2 * 15 / 16 * 4 * 50257 * 768
    latency = fast.cluster.latency(16, 1, "all-reduce")
    assert fast.exposed == pytest.approx(last / 400e9 + latency)
    # A network that is too slow hides as long as the backward pass, two thirds of computing.
    assert slow.exposed == pytest.approx(of_axis(slow, "data")[0].seconds - 2 / 3 * slow.computing)
    assert slow.computing == fast.computing
    assert slow.seconds > fast.seconds
    both = planner(config).predict(MeshShape(2, 2, 2), work)
    assert [one.hidden for one in of_axis(both, "tensor")] == [0.0]
    assert all(0 < one.hidden < one.seconds for one in of_axis(both, "shard"))
    assert both.seconds == pytest.approx(both.computing + sum(c.seconds - c.hidden for c in both.communication))


# ---- properties --------------------------------------------------------------------------------------------------------

PRESETS = ["gpt2", "bert-base", "transformer-base", "llama-7b", "palm-8b", "t5-small", "vit-base-16", "awd-lstm"]


def sizes_of(name: str) -> ModelConfig:
    config = preset(name)
    missing = {"source_vocab": 8000, "target_vocab": 8000, "n_classes": 10}
    return resolve(preset(name, **{field: n for field, n in missing.items() if not getattr(config, field)}))


@pytest.mark.parametrize("name", PRESETS)
def test_a_mesh_of_one_has_the_memory_of_one_device(name: str) -> None:
    config = sizes_of(name)
    length = min(64, config.max_len)
    found = predict(config, ONE, 3, length).memory
    expected = training_memory(config, 3, *side_lengths(config, length))
    for part in ("weights", "moments", "activations", "bf16 copies", "logits"):
        assert found["loss"][part] == expected[part], part
    assert found["update"]["gradients"] == expected["gradients"]
    most = max(sum(parts.values()) for parts in found.values())
    working = max(parts["working"] for parts in found.values()) + WORKSPACES
    assert most <= sum(expected.values()) + working  # which counts all parts as if they were there together


@pytest.mark.parametrize("name", ["gpt2", "transformer-base"])
@pytest.mark.parametrize("tensor", [1, 2])
def test_more_shards_never_need_more_memory_for_the_state(name: str, tensor: int) -> None:
    config = sizes_of(name)
    plan, work = planner(config), Workload(64, 64, 1, False)
    states = [plan.predict(MeshShape(64 // n, n, tensor), work).memory["update"] for n in (1, 2, 4, 8, 16, 64)]
    totals = [sum(parts.values()) - WORKSPACES for parts in states]
    assert totals == sorted(totals, reverse=True)
    assert totals[0] <= 64 * totals[-1] <= 1.05 * totals[0]  # shards are whole rows


@pytest.mark.parametrize("shards", [2, 3, 7])
def test_a_shard_has_the_rows_that_torch_chunk_gives_the_first_rank(shards: int) -> None:
    config = sizes_of("transformer-base")
    with torch.device("meta"):
        shapes = [torch.empty(p.shape) for p in Cost(config).model.parameters()]
    expected = sum(x.chunk(shards)[0].numel() for x in shapes)
    assert planner(config).rank_parameters(MeshShape(1, shards), "fp32").kept == expected


@pytest.mark.parametrize("settings", [{"positions": "learned"}, {"norm_kind": "rms", "bias": False, "tie": "none"}])
def test_bf16_parameters_take_the_bytes_of_their_tensors(settings: dict[str, Any]) -> None:
    config = tiny(**settings)
    model = make_model(config)
    weights_to_bf16(model)
    optimizer = make_optimizer(model, TrainConfig())
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    moments = [s[name] for s in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    found = predict(config, ONE, 1, param_dtype="bf16").memory["update"]
    assert found["weights"] == found["gradients"] == sum(p.nbytes for p in model.parameters())
    assert found["moments"] == sum(x.nbytes for x in moments)


def test_the_parts_of_tensor_parallel_ranks_add_up_to_the_model() -> None:
    config = sizes_of("llama-7b")
    plan = planner(config)
    replicated = sum(prod(p.shape) for p in plan.facts if not p.cut)
    for tensor in (2, 4, 8):
        own = plan.rank_parameters(MeshShape(1, 1, tensor), "fp32").kept
        assert tensor * (own - replicated) + replicated == plan.cost.parameters


# ---- meshes ------------------------------------------------------------------------------------------------------------


def test_a_mesh_is_read_as_it_is_written() -> None:
    assert parse_mesh("data=8,shard=4,tensor=2") == MeshShape(8, 4, 2)
    assert parse_mesh("tensor=2, data=3") == MeshShape(3, 1, 2)
    assert parse_mesh("shard=4,tensor=2", 64) == parse_mesh("data=0,shard=4,tensor=2", 64) == MeshShape(8, 4, 2)
    assert parse_mesh("shard=4") == MeshShape(1, 4)
    assert parse_mesh(str(MeshShape(8, 4, 2)), 64) == MeshShape(8, 4, 2)


@pytest.mark.parametrize("text", ["", "8", "data=", "data=x", "data=2,data=2", "pipe=2", "shard=0", "tensor=-1"])
def test_other_meshes_are_refused(text: str) -> None:
    with pytest.raises(RegardError, match="is no mesh"):
        parse_mesh(text)


@pytest.mark.parametrize(("text", "gpus"), [("data=8,shard=4,tensor=2", 32), ("shard=3", 8), ("shard=16", 8)])
def test_a_mesh_must_multiply_to_the_number_of_gpus(text: str, gpus: int) -> None:
    with pytest.raises(RegardError, match=f"but --gpus is {gpus}"):
        parse_mesh(text, gpus)


@pytest.mark.parametrize(
    ("config", "mesh", "batch", "message"),
    [
        (tiny(), MeshShape(4), 3, "3 rows are too few"),
        (tiny(), MeshShape(1, 1, 3), 1, "2 heads of keys and values, which tensor=3 does not divide"),
        (tiny(n_kv_heads=1), MeshShape(1, 1, 2), 1, "1 heads of keys and values"),
        (sizes_of("awd-lstm"), MeshShape(1, 1, 2), 1, "no part of it declares"),
    ],
)
def test_a_mesh_that_cannot_train_the_model_is_refused(
    config: ModelConfig, mesh: MeshShape, batch: int, message: str
) -> None:
    with pytest.raises(RegardError, match=message):
        predict(config, mesh, batch)


def test_a_rank_cannot_have_more_batches_than_rows() -> None:
    with pytest.raises(RegardError, match="the 2 rows of a rank cannot be divided into 3 batches"):
        predict(tiny(), MeshShape(2), 4, accumulate=3)


def test_all_meshes_of_a_number_of_gpus_are_tried() -> None:
    found = list(meshes_of(12, 4))
    assert len(found) == len(set(found))
    assert {mesh.gpus for mesh in found} == {12}
    assert {mesh.tensor for mesh in found} == {1, 2, 3, 4}  # within a node
    assert {mesh.shard for mesh in found if mesh.tensor == 1} == {1, 2, 3, 4, 6, 12}


def test_a_model_that_fits_one_gpu_is_replicated() -> None:
    config = resolve(preset("gpt2"))
    choice = planner(config).smallest_mesh(Workload(1024, 64), 8)
    assert choice.chosen.mesh == MeshShape(8)
    assert choice.chosen.work.accumulate == 1
    assert not choice.chosen.work.activation_checkpointing
    assert planner(config).smallest_mesh(Workload(1024, 8)).chosen.mesh == ONE


def test_the_smallest_mesh_fits_and_fewer_gpus_do_not() -> None:
    config = resolve(preset("llama2-70b"))
    plan, work = planner(config), Workload(4096, 64)
    choice = plan.smallest_mesh(work)
    assert choice.chosen.fits
    assert not any(one.fits for one in choice.refused)
    assert {one.mesh.gpus for one in choice.refused} == {1, 2, 4, 8}
    assert choice.chosen.mesh.gpus == 16
    assert choice.refused[-1].peak_memory > 16 * 69e9 / 8  # weights, gradients and moments in fp32
    best = min(plan.predict(mesh, work).seconds for mesh in meshes_of(16, 8) if plan.predict(mesh, work).fits)
    assert best <= choice.chosen.seconds <= 1.01 * best


def test_recomputing_and_accumulating_are_chosen_where_nothing_else_fits() -> None:
    config = resolve(preset("gpt2"))
    kind = GPUS["h200"]
    plan = planner(config)
    plain = plan.predict(ONE, Workload(1024, 64, 1, False)).peak_memory
    recomputed = plan.predict(ONE, Workload(1024, 64, 1, True)).peak_memory
    assert recomputed < plain < kind.memory
    assert plan.predict(ONE, Workload(1024, 64)).work == Workload(1024, 64, 1, False)
    small = make_cluster("a100-40gb")
    assert small.gpu.memory == 40 * GB
    found = ScalingPlanner(config, small).predict(ONE, Workload(1024, 512))
    assert found.fits
    assert found.work.accumulate is not None
    assert found.work.accumulate > 1


def test_where_nothing_fits_the_mesh_that_needs_the_least_is_shown() -> None:
    choice = planner(resolve(preset("gpt3"))).smallest_mesh(Workload(2048, 8), 8)
    assert not choice.chosen.fits
    assert choice.refused == ()
    assert choice.chosen.work.activation_checkpointing


@pytest.mark.parametrize(
    "wrong", [{"gpu": "h300"}, {"gpus_per_node": 0}, {"bandwidth": -1.0}, {"network": 0.0}, {"efficiency": 1.5}]
)
def test_a_cluster_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(RegardError, match=r"unknown --gpu|must be above 0"):
        make_cluster(**wrong)


# ---- the command -------------------------------------------------------------------------------------------------------


def call(*words: str) -> Result:
    app = typer.Typer()
    app.command()(cost)
    return CliRunner().invoke(app, words, obj={})


def test_the_command_predicts_a_mesh() -> None:
    done = call("gpt3", "--gpus", "64", "--gpu", "h200", "--mesh", "data=8,shard=4,tensor=2")
    assert done.exit_code == 0, done.output
    out = " ".join(done.stdout.split())
    assert out.startswith("gpt3 (gpt) on 64 x h200. A prediction from a model of costs; nothing was run or measured.")
    assert "32 rows of 2,048 tokens, 1 a rank" in out
    assert "does not fit 141.0 GB" in out
    assert "The mesh data=8,shard=4,tensor=2 needs" in out
    assert "450 GB/s in a node of 8, 50 GB/s between nodes" in out


def test_json_holds_the_same_prediction_as_the_function() -> None:
    words = ("llama-7b", "--gpus", "16", "--batch-tokens", "4M", "--network", "25", "--efficiency", "0.4", "--json")
    answer = json.loads(call(*words, "--gpu", "h100").stdout)
    made = planner(resolve(preset("llama-7b")), gpu="h100", network=25e9, efficiency=0.4)
    expected = made.smallest_mesh(Workload(2048, 4_000_000 // 2048), 16).chosen
    found = answer["predictions"][0]
    assert found.pop("refused") == []
    assert found == json.loads(json.dumps(expected.to_dict()))
    assert found["memory"]["fits"]
    assert found["memory"]["peak"] == sum(found["memory"]["phases"][found["memory"]["phase"]].values())
    assert prod(found["mesh"].values()) == found["gpus"] == 16


def test_several_numbers_of_gpus_are_a_table() -> None:
    done = call("gpt3", "--gpus", "64,256,1024,4096", "--batch", "1536")
    lines = [line.split() for line in done.stdout.splitlines()]
    rows = [line for line in lines if line and line[0] in ("64", "256", "1,024", "4,096")]
    assert [row[0] for row in rows] == ["64", "256", "1,024", "4,096"]
    speeds = [int(row[-2].replace(",", "")) for row in rows]
    assert speeds == sorted(speeds)
    assert all(row[2] == "1,536" for row in rows)


def test_without_a_number_the_fewest_gpus_are_found() -> None:
    out = call("llama2-70b", "--gpu", "h200", "--batch", "64").stdout
    assert "on 16 x h200" in out
    assert "Fewer GPUs do not fit:" in out
    assert "data=1,shard=1,tensor=1 needs" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gpt2", "--gpus", "32", "--mesh", "data=8,shard=4,tensor=2"], "= 64 GPUs, but --gpus is 32"),
        (["gpt2", "--gpus", "many"], "is no number of GPUs"),
        (["gpt2", "--gpus", "8,16", "--mesh", "data=8"], "one number of GPUs"),
        (["gpt2", "--network", "50"], "--network is for many GPUs"),
        (["gpt2", "--gpus", "8", "--tokens", "1B"], "--tokens is for one GPU"),
        (["gpt2", "--gpus", "8", "--batch", "1", "--batch-tokens", "1k"], "say the same"),
        (["gpt2", "--gpus", "8", "--batch-tokens", "1000"], "less than one row"),
        (["gpt2", "--gpus", "8", "--batch-tokens", "x"], "--batch-tokens is a number"),
        (["gpt2", "--gpus", "8", "--param-dtype", "fp8"], "fp32 or bf16"),
        (["gpt2", "--gpus", "8", "--accumulate", "0"], "--accumulate must be"),
        (["gpt2", "--gpus", "8", "--gpu", "tpu"], "unknown --gpu"),
        (["--gpus", "8"], "belong to a model"),
    ],
)
def test_what_cannot_be_planned_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(RegardError, match=message):
        raise call(*words).exception or AssertionError("nothing was refused")
