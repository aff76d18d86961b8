"""One model in llama.cpp, for llama.py: `llama_worker.py FILE PRECISION THREADS CONTEXT`.

FILE is in float32; another precision, by llama.cpp's number, is written beside it once. Requests
and answers are lines of JSON: `{"read": [ids], "at_once": true}` takes so many seconds,
`{"forget": true}` begins anew, `{"logits": 10}` are the last token's first ten.
"""

import ctypes
import json
import os
import sys
import time
from pathlib import Path

import llama_cpp as llama  # pyright: ignore[reportMissingImports]


@llama.llama_log_callback
def silent(level: int, text: bytes, data: object) -> None:
    """Say nothing of what llama.cpp says."""


def quantized(source: Path, precision: int) -> Path:
    """Return the file in a precision; 0 is float32."""
    target = source.with_name(f"{precision}.gguf")
    if precision == 0 or target.exists():
        return target if precision else source
    settings = llama.llama_model_quantize_default_params()
    settings.ftype = precision
    if llama.llama_model_quantize(bytes(source), bytes(target), ctypes.byref(settings)):
        sys.exit(f"llama.cpp did not write {target}")
    return target


def main() -> None:
    """Answer until the input ends."""
    source, precision, threads, length = Path(sys.argv[1]), *map(int, sys.argv[2:])
    llama.llama_log_set(silent, None)
    llama.llama_backend_init()
    path = quantized(source, precision)
    model = llama.llama_model_load_from_file(bytes(path), llama.llama_model_default_params())
    settings = llama.llama_context_default_params()
    settings.n_ctx = settings.n_batch = settings.n_ubatch = length
    settings.n_threads = settings.n_threads_batch = threads
    context = llama.llama_init_from_model(model, settings)
    if not context:
        sys.exit(f"llama.cpp did not load {path}")
    for line in sys.stdin:
        request = json.loads(line)
        answer: object = True
        if "read" in request:
            ids = request["read"]
            pieces = [ids] if request["at_once"] else [[token] for token in ids]
            start = time.perf_counter()
            for piece in pieces:
                given = (llama.llama_token * len(piece))(*piece)
                if llama.llama_decode(context, llama.llama_batch_get_one(given, len(piece))):
                    sys.exit("llama.cpp did not read the tokens")
            answer = time.perf_counter() - start
        elif "forget" in request:
            llama.llama_memory_clear(llama.llama_get_memory(context), True)
        else:
            answer = llama.llama_get_logits_ith(context, -1)[: request["logits"]]
        print(json.dumps(answer), flush=True)
    os._exit(0)  # llama.cpp's own ending takes its time


if __name__ == "__main__":
    main()
