//! A launch reports its milestones in time, and not early.

mod common;

use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

use common::Device;
use wormhole_ptx::{GlobalMemory, LaunchConfig, Milestones};

const BLOCKS: u32 = 6;
const THREADS: u32 = 40;
/// Number of words in which kernels count and wait: threads before the trigger, permission to pass it, permission to
/// end, threads after it.
const WORDS: usize = 4;

/// Kernel in which every thread waits until all blocks have begun, one of each block triggers, and then every thread
/// waits until all have triggered. Blocks of an odd number end instead if `some` is not 0. Every wait is bounded.
const KERNEL: &str = r"
.version 8.0
.target sm_90
.address_size 64
.visible .entry steps(.param .u64 words, .param .u32 some)
{
    .reg .pred %p<5>;
    .reg .b32 %r<8>;
    .reg .b64 %rd<2>;
    ld.param.u64 %rd1, [words];
    ld.param.u32 %r1, [some];
    griddepcontrol.wait;
    mov.u32 %r2, 0;
BEGUN:
    add.u32 %r2, %r2, 1;
    ld.volatile.global.u32 %r3, [%rd1+4];
    setp.eq.u32 %p1, %r3, 0;
    setp.lt.u32 %p2, %r2, 200000;
    and.pred %p1, %p1, %p2;
    @%p1 bra BEGUN;
    red.global.add.u32 [%rd1], 1;
    bar.sync 0;
    mov.u32 %r4, %ctaid.x;
    and.b32 %r4, %r4, %r1;
    setp.ne.u32 %p3, %r4, 0;
    @%p3 ret;
    mov.u32 %r5, %tid.x;
    setp.eq.u32 %p4, %r5, 33;
    @%p4 griddepcontrol.launch_dependents;
    @%p4 griddepcontrol.launch_dependents;
    mov.u32 %r2, 0;
TRIGGERED:
    add.u32 %r2, %r2, 1;
    ld.volatile.global.u32 %r3, [%rd1+8];
    setp.eq.u32 %p1, %r3, 0;
    setp.lt.u32 %p2, %r2, 200000;
    and.pred %p1, %p1, %p2;
    @%p1 bra TRIGGERED;
    red.global.add.u32 [%rd1+12], 1;
    ret;
}
.visible .entry silent(.param .u64 words, .param .u32 some)
{
    .reg .b64 %rd<2>;
    ld.param.u64 %rd1, [words];
    red.global.add.u32 [%rd1], 1;
    ret;
}
";

/// Records the kernel's counts at each milestone, and then lets the kernel continue.
#[derive(Debug)]
struct Heard<'a> {
    words: [&'a AtomicU32; WORDS],
    told: Mutex<Vec<(&'static str, u32, u32)>>,
}

impl<'a> Heard<'a> {
    fn new(device: &'a Device, address: u64) -> Self {
        let words = [0, 4, 8, 12].map(|offset| {
            let region = device.memory.region(address + offset, 4).unwrap();
            let place = usize::try_from(address + offset - region.start).unwrap();
            // SAFETY: inside the region, which lives as long as the device; all access is atomic.
            unsafe { AtomicU32::from_ptr(region.host.wrapping_add(place).cast()) }
        });
        let told = Mutex::default();
        Self { words, told }
    }

    fn note(&self, what: &'static str, let_go: usize) {
        let [before, _, _, after] = self.words.map(|word| word.load(Ordering::SeqCst));
        self.told.lock().unwrap().push((what, before, after));
        self.words[let_go].store(1, Ordering::SeqCst);
    }
}

impl Milestones for Heard<'_> {
    fn begun(&self) {
        self.note("begun", 1);
    }

    fn triggered(&self) {
        self.note("triggered", 2);
    }
}

fn run(kernel: &str, some: u64) -> (Vec<(&'static str, u32, u32)>, [u32; 2]) {
    let device = Device::load(KERNEL.as_bytes());
    let address = device.memory.alloc(4 * WORDS);
    let heard = Heard::new(&device, address);
    let config = LaunchConfig {
        grid: [BLOCKS, 1, 1],
        block: [THREADS, 1, 1],
        threads: 2,
        milestones: Some(&heard),
        ..LaunchConfig::default()
    };
    device
        .launch_with(kernel, config, &[address, some])
        .unwrap();
    let counts = [0, 3].map(|index| heard.words[index].load(Ordering::SeqCst));
    (heard.told.into_inner().unwrap(), counts)
}

#[test]
fn milestones_are_reported_while_blocks_wait_for_them_and_not_before() {
    let all = BLOCKS * THREADS;
    let (told, counts) = run("steps", 0);
    assert_eq!(told, [("begun", 0, 0), ("triggered", all, 0)]);
    assert_eq!(counts, [all, all]);
}

#[test]
fn blocks_that_end_have_triggered() {
    let all = BLOCKS * THREADS;
    let (told, counts) = run("steps", 1);
    assert_eq!(told, [("begun", 0, 0), ("triggered", all, 0)]);
    assert_eq!(counts, [all, all / 2]);
    let (told, _) = run("silent", 0);
    assert_eq!(told.len(), 2);
    assert_eq!((told[0].0, told[1]), ("begun", ("triggered", all, 0)));
}
