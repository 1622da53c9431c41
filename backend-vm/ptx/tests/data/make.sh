#!/bin/sh
# Makes the images of `link.rs` from the sources here. `cargo xtask fixtures` runs it with the path of nvcc.
#
# nvlink writes the folders of its command line into its output, and nvcc passes it the folders beside nvcc's own path:
# every tool is called by a relative path.
set -eu

data=$(cd "$(dirname "$0")" && pwd)
toolkit=$(cd "$(dirname "$1")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$data"/*.cu "$work"
ln -s "$toolkit" "$work/cuda"
cd "$work"

# PTX alone, machine code alone, and both.
cuda/bin/nvcc -gencode arch=compute_75,code=compute_75 -dc uses.cu defines.cu store.cu
cuda/bin/nvcc -gencode arch=compute_75,code=sm_75 -dc defines.cu -o machine.o
ar rcD library.a store.o defines.o
mkdir both
cuda/bin/nvcc -arch=sm_75 -dc uses.cu defines.cu -odir both

# The fat binaries of a program of two units: the linked one, and those of its units.
cuda/bin/nvcc -arch=sm_75 -dlink -fatbin both/uses.o both/defines.o -o relocatable.fatbin
for unit in uses defines; do
    objcopy --dump-section "__nv_relfatbin=$unit.fatbin" "both/$unit.o" "$unit.none"
    truncate -s %8 relocatable.fatbin
    cat "$unit.fatbin" >> relocatable.fatbin
done

for made in uses.o defines.o machine.o library.a relocatable.fatbin; do
    for folder in "$data" "$toolkit" "$work"; do
        if grep -aqF "$folder" "$made"; then
            echo "$made holds the path $folder of this machine" >&2
            exit 1
        fi
    done
    cp "$made" "$data"
done
