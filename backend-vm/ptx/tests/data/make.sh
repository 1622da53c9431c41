#!/bin/sh
# Makes the images of `link.rs` from the sources here. `cargo xtask fixtures` runs it with the path of nvcc and the folder
# for the images.
#
# Whoever calls it gets the same images again. nvcc hashes the path of a source into the names of its symbols, so the
# sources are compiled in a folder of one name; and it names objects for its own process, unless it keeps them. nvlink
# writes the folders of its command line into its output, and nvcc passes it the folders beside nvcc's own path: every
# tool is called by a relative path.
set -eu

data=$(cd "$(dirname "$0")" && pwd)
toolkit=$(cd "$(dirname "$1")/.." && pwd)
output=$(cd "$2" && pwd)
work=/tmp/wormhole-fixtures
mkdir "$work"
trap 'rm -rf "$work"' EXIT
cp "$data"/*.cu "$work"
ln -s "$toolkit" "$work/cuda"
cd "$work"
nvcc="cuda/bin/nvcc -keep"

# PTX alone, machine code alone, and both.
$nvcc -gencode arch=compute_75,code=compute_75 -dc uses.cu defines.cu store.cu
$nvcc -gencode arch=compute_75,code=sm_75 -dc defines.cu -o machine.o
ar rcD library.a store.o defines.o
mkdir both
$nvcc -arch=sm_75 -dc uses.cu defines.cu -odir both

# The fat binaries of a program of two units: the linked one, and those of its units.
$nvcc -arch=sm_75 -dlink -fatbin both/uses.o both/defines.o -o relocatable.fatbin
for unit in uses defines; do
    objcopy --dump-section "__nv_relfatbin=$unit.fatbin" "both/$unit.o" "$unit.none"
    truncate -s %8 relocatable.fatbin
    cat "$unit.fatbin" >> relocatable.fatbin
done

for made in uses.o defines.o machine.o library.a relocatable.fatbin; do
    for folder in "$data" "$toolkit"; do
        if grep -aqF "$folder" "$made"; then
            echo "$made holds the path $folder of this machine" >&2
            exit 1
        fi
    done
    cp "$made" "$output"
done
