#!/bin/sh
# Makes the images of `printing.rs` from the source here. `cargo xtask fixtures` runs it with the path of nvcc.
set -eu
cd "$(dirname "$0")"
"$1" -cubin -arch sm_90 -o printing.cubin printing.cu
"$1" -cubin -rdc=true -arch sm_90 -o printing_relocatable.cubin printing.cu
