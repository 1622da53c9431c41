#!/bin/sh
# Makes the images of `printing.rs` from the source here. `cargo xtask fixtures` runs it with the path of nvcc and the
# folder for the images.
set -eu
output=$(cd "$2" && pwd)
cd "$(dirname "$0")"
"$1" -cubin -arch sm_90 -o "$output/printing.cubin" printing.cu
"$1" -cubin -rdc=true -arch sm_90 -o "$output/printing_relocatable.cubin" printing.cu
