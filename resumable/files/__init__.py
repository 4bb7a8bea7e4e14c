"""Bytes that survive a power cut: files, locks, hashes and how a state is laid out in them."""

__all__ = [
    "block_queue",
    "codec",
    "container_copies",
    "disk",
    "encoder",
    "file_reader",
    "fingerprint",
    "jsonl",
    "large_files",
    "lock",
    "pin",
    "safetensors_header",
    "sharded_tensor",
    "strict_json",
    "tensor_file",
    "tensor_groups",
    "threads",
]
