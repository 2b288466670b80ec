# torchtitan (b5bcd76c), 1 node of 8 GPUs. Written by milpplan 0.
# llama3-8b on 8 GPUs (dgx-h100), 16 sequences of 8192 tokens a step.
# Layout: tp 1, cp 1, ep 1, etp 1, pp 1, dp 8, vpp 1; ZeRO 3, 1f1b.
# Note: Weights are kept in fp32, sharded, beside the gathered bf16 ones: what the plan counts as master
#     weights.
# Note: Documents are packed and masked apart; the plan counts attention over whole sequences.

from torchtitan.components.data import ConcatThenSplitPackingConfig, GrainDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer


def plan() -> Trainer.Config:
    """The run of the plan."""
    model_spec = model_registry("8B")
    return Trainer.Config(
        model_spec=model_spec,
        # The batch of a step, and number formats.
        training=TrainingConfig(
            num_tokens_per_microbatch_per_dp_rank=8192,
            num_tokens_per_train_step=131072,
            max_context_length=8192,
            dtype="float32",
            mixed_precision_param="bfloat16",
            mixed_precision_reduce="float32",
            disable_cuda_graphs=True,
            steps=100,
        ),
        # Degrees, stages and sharding.
        parallelism=ParallelismConfig(
            data_parallel_replicate_degree=1,
            data_parallel_shard_degree=8,
            fsdp_reshard_after_forward="always",
            tensor_parallel_degree=1,
            context_parallel_degree=1,
            pipeline_parallel_degree=1,
            enable_sequence_parallel=False,
        ),
        # Recomputation of whole layers, of all or of none.
        activation_checkpoint=None,
        # Layers are compiled: their kernels are fused, as they are priced.
        compile=CompileConfig(
            enable=True,
            components=["model", "loss"],
        ),
        # Not decided by the plan: tokenizer, data, learning rates.
        loss=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(model_spec)),
        hf_assets_path="./assets/hf/tokenizer",
        dataloader=GrainDataLoader.Config(dataset=ConcatThenSplitPackingConfig(dataset=DATASETS["c4"])),
        optimizer=default_adamw(lr=3e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=20),
    )
