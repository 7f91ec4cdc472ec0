"""infinity where its users are: DeepSpeed, Transformers, Accelerate, Lightning; each is imported only when used."""
