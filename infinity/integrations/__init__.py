"""infinity where its users are: DeepSpeed, Transformers, Accelerate, Lightning."""
