//! Runs the kernels of PTX text with memory, textures and surfaces, with or without the checker.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use wormhole_ptx::{
    AddressMode, ChannelType, GlobalMemory, Image, LaunchConfig, Level, Module, Objects, Output,
    Region, Texture, launch,
};

use crate::text_of;

/// Time after which a kernel is cancelled.
const LIMIT: Duration = Duration::from_millis(10);
/// Words of the memory that kernels can access.
const WORDS: usize = 1 << 10;
/// Greatest size of a module's variables; modules with more are skipped.
const MOST_BYTES: u64 = 1 << 12;

/// Global memory whose addresses are those of the process.
struct Memory(Box<[u64; WORDS]>);

impl Memory {
    fn start(&self) -> u64 {
        self.0.as_ptr() as u64
    }
}

// SAFETY: the words live as long as the memory, aligned to 8 bytes, and nothing but kernels touches them.
unsafe impl GlobalMemory for Memory {
    fn region(&self, address: u64, bytes: u64) -> Option<Region> {
        let start = self.start().next_multiple_of(16);
        let length = 8 * WORDS as u64 - 16;
        let end = address.checked_add(bytes)?;
        (address >= start && end <= start + length).then_some(Region {
            start,
            bytes: length,
            host: start as *mut u8,
            writable: true,
        })
    }
}

struct Silent;

impl Output for Silent {
    fn printf(&self, _: &[u8]) {}
    fn assertion(&self, _: &[u8]) {}
    fn finding(&self, _: &str) {}
}

/// Table of textures and surfaces in which every handle is valid: the handle's bits select the kind, and some texels
/// lie outside the memory.
#[derive(Debug)]
struct Everything {
    address: u64,
}

impl Everything {
    fn image(&self, handle: u64) -> Image {
        const CHANNELS: [ChannelType; 8] = [
            ChannelType::Unsigned8,
            ChannelType::Unsigned16,
            ChannelType::Unsigned32,
            ChannelType::Signed8,
            ChannelType::Signed16,
            ChannelType::Signed32,
            ChannelType::Half,
            ChannelType::Single,
        ];
        let cubes = handle & 8 != 0;
        let level = Level {
            address: self.address,
            extent: [4, 4, if cubes { 1 } else { 2 }],
            row_pitch: 64,
            slice_pitch: 1 << 9,
        };
        Image {
            channel: CHANNELS[(handle & 7) as usize],
            channels: [1, 2, 4][((handle >> 4) % 3) as usize],
            dimensions: 2,
            layers: if cubes { 12 } else { 2 },
            layered: handle & 0x40 != 0,
            cubes,
            levels: vec![level; 2],
        }
    }
}

impl Objects for Everything {
    fn texture(&self, handle: u64) -> Option<Arc<Texture>> {
        Some(Arc::new(Texture {
            image: self.image(handle),
            address_modes: [AddressMode::Wrap, AddressMode::Border, AddressMode::Mirror],
            linear: handle & 0x80 == 0,
            linear_levels: handle & 0x100 == 0,
            normalized: handle & 0x200 == 0,
            as_floats: handle & 0x400 == 0,
            srgb: handle & 0x800 == 0,
            seamless: handle & 0x1000 == 0,
            border: [0x3f00_0000; 4],
            level_bias: 0.25,
            level_clamp: [-1.0, f32::INFINITY],
        }))
    }

    fn surface(&self, handle: u64) -> Option<Arc<Image>> {
        Some(Arc::new(self.image(handle)))
    }
}

pub fn run(input: &[u8]) {
    let text = text_of(input);
    let Ok(module) = Module::from_ptx(text) else {
        return;
    };
    let memory = Memory(Box::new([0x0101_0101_0101_0101; WORDS]));
    let start = memory.start().next_multiple_of(16);
    if module
        .variables()
        .iter()
        .any(|variable| variable.size() > MOST_BYTES)
    {
        return;
    }
    let names: Vec<String> = module.kernel_names().map(str::to_owned).collect();
    let addresses = vec![start; module.variables().len()];
    let program = module.link(addresses);
    let objects = Everything { address: start };
    for name in names {
        let Ok(kernel) = program.kernel(&name) else {
            continue;
        };
        let words = kernel.param_bytes() as usize / 8 + 1;
        let params = start.to_le_bytes().repeat(words);
        let cancel = AtomicBool::new(false);
        let (done, finished) = mpsc::channel::<()>();
        std::thread::scope(|scope| {
            let cancel = &cancel;
            scope.spawn(move || {
                if finished.recv_timeout(LIMIT) == Err(mpsc::RecvTimeoutError::Timeout) {
                    cancel.store(true, Ordering::Relaxed);
                }
            });
            let config = LaunchConfig {
                block: [40, 1, 1],
                dynamic_shared: 256,
                params: &params,
                objects: Some(&objects),
                cancel: Some(cancel),
                check: text.len().is_multiple_of(2),
                ..LaunchConfig::default()
            };
            let _ = launch(&kernel, &config, &memory, &Silent);
            drop(done);
        });
    }
}
