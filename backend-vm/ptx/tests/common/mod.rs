//! Device memory and captured output for tests.

#![allow(dead_code, reason = "each test program uses a part")]
#![allow(clippy::cast_possible_truncation, reason = "sizes of small buffers")]

pub mod eval;

use std::path::{Path, PathBuf};
use std::sync::Mutex;

use wormhole_ptx::{
    DeviceHeap, Fault, GlobalMemory, Kernel, LaunchConfig, Module, Output, Program, Region, launch,
};

/// Allocations of this process that kernels may access.
#[derive(Default)]
pub struct Memory {
    blocks: Mutex<Vec<Vec<u64>>>,
}

impl Memory {
    /// Allocates zeroed memory, and returns its address.
    pub fn alloc(&self, bytes: usize) -> u64 {
        let mut block = vec![0_u64; bytes.div_ceil(8).max(1) + 2];
        let address = block.as_mut_ptr() as u64;
        self.blocks.lock().unwrap().push(block);
        address.next_multiple_of(16)
    }

    /// Allocates memory that holds `values`, and returns its address.
    pub fn upload<T: Copy>(&self, values: &[T]) -> u64 {
        let address = self.alloc(size_of_val(values));
        self.write(address, values);
        address
    }

    /// Copies values to an allocation.
    pub fn write<T: Copy>(&self, address: u64, values: &[T]) {
        let bytes = size_of_val(values);
        let region = self
            .region(address, bytes as u64)
            .expect("inside an allocation");
        let at = region.host.wrapping_add((address - region.start) as usize);
        // SAFETY: the region has room, and no launch runs meanwhile.
        unsafe { std::ptr::copy_nonoverlapping(values.as_ptr().cast::<u8>(), at, bytes) };
    }

    /// Copies values from an allocation.
    pub fn read<T: Copy + Default>(&self, address: u64, count: usize) -> Vec<T> {
        let mut values = vec![T::default(); count];
        let bytes = size_of_val(&values[..]);
        let region = self
            .region(address, bytes as u64)
            .expect("inside an allocation");
        let at = region.host.wrapping_add((address - region.start) as usize);
        // SAFETY: the region holds that many bytes, and no launch runs meanwhile.
        unsafe { std::ptr::copy_nonoverlapping(at, values.as_mut_ptr().cast::<u8>(), bytes) };
        values
    }
}

// SAFETY: blocks are never freed or resized while the memory lives, and vectors of u64 are
// writable and at least as aligned as their addresses say.
unsafe impl GlobalMemory for Memory {
    fn region(&self, address: u64, bytes: u64) -> Option<Region> {
        let blocks = self.blocks.lock().unwrap();
        blocks.iter().find_map(|block| {
            let first = block.as_ptr() as u64;
            let start = first.next_multiple_of(16);
            let length = (block.len() * 8) as u64 - 16;
            let inside = address >= start && address.checked_add(bytes)? <= start + length;
            let host = (block.as_ptr() as *mut u8).wrapping_add((start - first) as usize);
            inside.then_some(Region {
                start,
                bytes: length,
                host,
                writable: true,
            })
        })
    }
}

/// Output of all kernels.
#[derive(Default)]
pub struct Printed(pub Mutex<Vec<u8>>);

impl Printed {
    pub fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }
}

impl Output for Printed {
    fn printf(&self, text: &[u8]) {
        self.0.lock().unwrap().extend_from_slice(text);
    }
    fn assertion(&self, text: &[u8]) {
        self.0.lock().unwrap().extend_from_slice(text);
    }
    fn finding(&self, sentence: &str) {
        let mut text = self.0.lock().unwrap();
        text.extend_from_slice(sentence.as_bytes());
        text.push(b'\n');
    }
}

/// Module, its memory and its output.
pub struct Device {
    pub memory: Memory,
    pub output: Printed,
    pub program: Program,
    pub heap: DeviceHeap,
}

impl Device {
    /// Loads the PTX that nvcc made of a file of kernels: the one beside it, or one that another nvcc made, in the
    /// folder that `WORMHOLE_KERNELS` names.
    pub fn of(kernels: &str) -> Self {
        let kept = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/kernels");
        let folder = std::env::var_os("WORMHOLE_KERNELS").map_or(kept, PathBuf::from);
        let path = folder.join(kernels).with_extension("ptx");
        let text =
            std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        Self::load(&text)
    }

    /// Loads an image, and allocates its variables.
    pub fn load(image: &[u8]) -> Self {
        let module = Module::load(image).unwrap();
        let memory = Memory::default();
        let addresses: Vec<u64> = module
            .variables()
            .iter()
            .map(|variable| memory.alloc(variable.size() as usize))
            .collect();
        let program = module.link(addresses.clone());
        for (index, address) in addresses.iter().enumerate() {
            program.write_initial(index, |offset, bytes| memory.write(address + offset, bytes));
        }
        let heap_bytes = 1 << 16;
        let heap = DeviceHeap::new(memory.alloc(heap_bytes), heap_bytes as u64);
        Self {
            memory,
            output: Printed::default(),
            program,
            heap,
        }
    }

    pub fn kernel(&self, name: &str) -> std::sync::Arc<Kernel> {
        self.program
            .kernel(name)
            .unwrap_or_else(|error| panic!("{error}"))
    }

    /// Launches a kernel with 64-bit words as parameters, each cut to its parameter's size.
    pub fn launch(&self, name: &str, grid: u32, block: u32, args: &[u64]) -> Result<(), Fault> {
        self.launch_with(
            name,
            LaunchConfig {
                grid: [grid, 1, 1],
                block: [block, 1, 1],
                threads: 2,
                ..LaunchConfig::default()
            },
            args,
        )
    }

    pub fn launch_with(
        &self,
        name: &str,
        config: LaunchConfig<'_>,
        args: &[u64],
    ) -> Result<(), Fault> {
        let kernel = self.kernel(name);
        let mut params = vec![0; kernel.param_bytes() as usize];
        assert_eq!(kernel.params().len(), args.len());
        for (layout, arg) in kernel.params().iter().zip(args) {
            let (at, size) = (layout.offset as usize, layout.size as usize);
            params[at..at + size].copy_from_slice(&arg.to_le_bytes()[..size]);
        }
        launch(
            &kernel,
            &LaunchConfig {
                params: &params,
                heap: Some(&self.heap),
                ..config
            },
            &self.memory,
            &self.output,
        )
    }
}
