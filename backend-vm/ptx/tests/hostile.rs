//! Randomly damaged kernels run, fault or are cancelled; they never panic.

mod common;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use common::{Memory, Printed};
use proptest::prelude::*;
use wormhole_ptx::{
    AddressMode, ChannelType, DeviceHeap, Image, LaunchConfig, Level, Module, Objects, Texture,
    launch,
};

const BASICS: &str = include_str!("kernels/basics.ptx");
const MODULES: [&str; 5] = [
    BASICS,
    include_str!("kernels/library.ptx"),
    include_str!("kernels/asynchronous.ptx"),
    include_str!("kernels/matrices.ptx"),
    include_str!("kernels/textures.ptx"),
];
/// Maximum duration of a damaged kernel before it is cancelled.
const LIMIT: Duration = Duration::from_millis(4);
/// Maximum duration of a kernel that is known to end.
const PATIENCE: Duration = Duration::from_secs(60);
/// Kernels of [`BASICS`] that end, with any arguments.
const ENDING: [&str; 8] = [
    "vector_add",
    "spin_lock",
    "diverge",
    "recursion",
    "heap",
    "warps",
    "split_sync",
    "many_blocks",
];

/// Objects in which every handle names one object, whose texels are not all in memory.
#[derive(Debug)]
struct Everything(Image);

impl Objects for Everything {
    fn texture(&self, handle: u64) -> Option<Arc<Texture>> {
        let mode = [AddressMode::Wrap, AddressMode::Border, AddressMode::Mirror];
        Some(Arc::new(Texture {
            image: self.0.clone(),
            address_modes: mode,
            linear: handle & 32 == 0,
            linear_levels: true,
            normalized: handle & 16 == 0,
            as_floats: true,
            srgb: true,
            seamless: handle & 8 == 0,
            border: [5; 4],
            level_bias: f32::NAN,
            level_clamp: [-1.0, f32::INFINITY],
        }))
    }
    fn surface(&self, _: u64) -> Option<Arc<Image>> {
        Some(Arc::new(self.0.clone()))
    }
}

/// Runs each wanted kernel of a module once, under the checker if `check`, and cancels it after a time. Returns how
/// many ran to their end.
fn run_all(text: &str, check: bool, limit: Duration, wanted: impl Fn(&str) -> bool) -> usize {
    let Ok(module) = Module::from_ptx(text) else {
        return 0;
    };
    let memory = Memory::default();
    let small = |bytes: u64| usize::try_from(bytes.min(1 << 20)).unwrap_or(0);
    let addresses: Vec<u64> = module
        .variables()
        .iter()
        .map(|variable| memory.alloc(small(variable.size())))
        .collect();
    let names: Vec<String> = module.kernel_names().map(str::to_owned).collect();
    let program = module.link(addresses);
    let buffer = memory.alloc(1 << 12);
    let heap = DeviceHeap::new(memory.alloc(1 << 12), 1 << 12);
    let output = Printed::default();
    let level = Level {
        address: buffer,
        extent: [9, 7, 5],
        row_pitch: 36,
        slice_pitch: 1 << 40,
    };
    let objects = Everything(Image {
        channel: ChannelType::Unsigned8,
        channels: 4,
        dimensions: 2,
        // The image consists of cubes if the launch is checked.
        layers: if check { 12 } else { 3 },
        layered: true,
        cubes: check,
        levels: vec![level; 2],
    });
    let mut ended = 0;
    for name in names.into_iter().filter(|name| wanted(name)) {
        let Ok(kernel) = program.kernel(&name) else {
            continue;
        };
        let params: Vec<u8> = buffer
            .to_le_bytes()
            .repeat(kernel.param_bytes() as usize / 8 + 1);
        let cancel = AtomicBool::new(false);
        let (done, finished) = mpsc::channel::<()>();
        std::thread::scope(|scope| {
            let cancel = &cancel;
            scope.spawn(move || {
                if finished.recv_timeout(limit) == Err(mpsc::RecvTimeoutError::Timeout) {
                    cancel.store(true, Ordering::Relaxed);
                }
            });
            let config = LaunchConfig {
                grid: [2, 1, 1],
                block: [40, 1, 1],
                dynamic_shared: 256,
                params: &params,
                heap: Some(&heap),
                objects: Some(&objects),
                cancel: Some(cancel),
                check,
                threads: 2,
                ..LaunchConfig::default()
            };
            ended += usize::from(launch(&kernel, &config, &memory, &output).is_ok());
            drop(done);
        });
    }
    ended
}

/// Returns an instruction's opcode, and the text before and after it.
fn opcode(line: &str) -> Option<(&str, &str, &str)> {
    let start = line.len() - line.trim_start().len();
    let start = match line[start..].strip_prefix('@') {
        Some(rest) => line.len() - rest.split_once(char::is_whitespace)?.1.trim_start().len(),
        None => start,
    };
    let length = line[start..].find([' ', '\t', ';'])?;
    let (before, rest) = line.split_at(start);
    let (opcode, after) = rest.split_at(length);
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | ':' | '_');
    (opcode.starts_with(|c: char| c.is_ascii_lowercase()) && opcode.chars().all(plain))
        .then_some((before, opcode, after))
}

/// Replaces a line's opcode, or a part of it, by another line's.
fn graft(to: &str, from: &str, part: usize) -> Option<String> {
    let ((before, old, after), (_, new, _)) = (opcode(to)?, opcode(from)?);
    let mut parts: Vec<&str> = old.split('.').collect();
    let others: Vec<&str> = new.split('.').collect();
    let opcode = if part.is_multiple_of(3) {
        new.to_owned()
    } else {
        let at = part % parts.len();
        parts[at] = others[part / 3 % others.len()];
        parts.join(".")
    };
    Some(format!("{before}{opcode}{after}"))
}

/// Exchanges, repeats and drops lines, and swaps numbers and opcodes in them.
fn damage(text: &str, edits: &[(prop::sample::Index, prop::sample::Index, u8)]) -> String {
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    for (from, to, kind) in edits {
        let (from, to) = (from.index(lines.len()), to.index(lines.len()));
        match kind % 6 {
            0 => lines.swap(from, to),
            1 => lines[to] = lines[from].clone(),
            2 => {
                let digit = char::from(b'0' + kind % 10);
                lines[to] = lines[to]
                    .chars()
                    .map(|c| if c.is_ascii_digit() { digit } else { c })
                    .collect();
            }
            3 => {
                lines.remove(to);
            }
            _ => {
                if let Some(line) = graft(&lines[to], &lines[from], usize::from(kind / 6)) {
                    lines[to] = line;
                }
            }
        }
    }
    lines.join("\n")
}

#[test]
fn undamaged_kernels_end() {
    for check in [false, true] {
        let ended = run_all(BASICS, check, PATIENCE, |name| ENDING.contains(&name));
        assert_eq!(ended, ENDING.len(), "checked: {check}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn damaged_kernels_never_panic(
        module in 0..MODULES.len(),
        check in any::<bool>(),
        edits in proptest::collection::vec(any::<(prop::sample::Index, prop::sample::Index, u8)>(), 1..24),
    ) {
        run_all(&damage(MODULES[module], &edits), check, LIMIT, |_| true);
    }
}
