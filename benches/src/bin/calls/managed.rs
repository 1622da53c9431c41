//! Kernels on managed memory, which driver and Wormhole move between host and device.

use std::ffi::CStr;
use std::ptr::null_mut;
use std::time::Instant;

use wormhole_api::constants::memory_attach_flags::GLOBAL;
use wormhole_api::ctypes::c_void;
use wormhole_benches::driver::{DriverError, Handle};

use crate::{Program, size, timed};

/// Adds one buffer to the other, word by word.
const IMAGE: &CStr = c"
.version 7.0
.target sm_70
.address_size 64
.visible .entry add(.param .u64 to, .param .u64 from, .param .u32 count)
{
    .reg .b64 %a<5>;
    .reg .b32 %r<8>;
    .reg .pred %p;
    ld.param.u64 %a1, [to];
    ld.param.u64 %a2, [from];
    ld.param.u32 %r1, [count];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.u32 %r5, %r2, %r3, %r4;
    mov.u32 %r6, %nctaid.x;
    mul.lo.u32 %r6, %r6, %r3;
next:
    setp.ge.u32 %p, %r5, %r1;
    @%p bra done;
    mul.wide.u32 %a3, %r5, 4;
    add.u64 %a4, %a2, %a3;
    add.u64 %a3, %a1, %a3;
    ld.global.u32 %r7, [%a4];
    ld.global.u32 %r4, [%a3];
    add.u32 %r7, %r7, %r4;
    st.global.u32 [%a3], %r7;
    add.u32 %r5, %r5, %r6;
    bra next;
done:
    ret;
}
";
const PAGE: usize = 4096;
const BLOCKS: u32 = 1024;
const THREADS: u32 = 256;

pub fn measure(program: &mut Program) -> Result<(), DriverError> {
    // A run that only tries the benchmark takes little memory.
    let bytes = if program.samples < 1000 { 4 } else { 256 } << 20;
    let rounds = (program.samples / 40).clamp(2, 50);
    let (mut module, mut function) = (0, 0);
    program.driver.cuModuleLoadData(&mut module, IMAGE)?;
    program
        .driver
        .cuModuleGetFunction(&mut function, module, c"add")?;
    let mut buffers = [0_u64; 2];
    for buffer in &mut buffers {
        program
            .driver
            .cuMemAllocManaged(&mut *buffer, bytes, GLOBAL)?;
        touch(*buffer, (0..bytes / PAGE).map(|page| page * PAGE));
    }
    // The first touches by the device.
    for _ in 0..2 {
        add(program, function, buffers, bytes)?;
    }
    let mut times = Vec::new();
    for _ in 0..rounds {
        times.push(timed(|| add(program, function, buffers, bytes))?);
    }
    let named = |with: &str| format!("2 x {} of managed memory{with}", size(bytes));
    let calls = "cuLaunchKernel, cuStreamSynchronize";
    program.row(calls, named(""), times, 1);
    let (mut times, mut state) = (Vec::new(), 1_usize);
    for _ in 0..rounds {
        let start = Instant::now();
        for buffer in buffers {
            let pages = (0..bytes / PAGE / 100).map(|_| {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1);
                (state >> 33) % (bytes / PAGE) * PAGE
            });
            touch(buffer, pages);
        }
        add(program, function, buffers, bytes)?;
        times.push(start.elapsed());
    }
    program.row(
        calls,
        named(", the program writes to 1 % of its pages"),
        times,
        1,
    );
    for buffer in buffers {
        program.driver.cuMemFree_v2(buffer)?;
    }
    program.driver.cuModuleUnload(module)
}

/// Adds one to a word at each offset of a buffer.
fn touch(buffer: u64, offsets: impl Iterator<Item = usize>) {
    let start = std::ptr::with_exposed_provenance_mut::<u8>(usize::try_from(buffer).unwrap_or(0));
    for offset in offsets {
        // SAFETY: the offset lies in the buffer, which the device does not use meanwhile.
        unsafe {
            let word = start.add(offset).cast::<u32>();
            word.write_volatile(word.read_volatile().wrapping_add(1));
        }
    }
}

/// Has the device add the second buffer to the first.
fn add(
    program: &Program,
    function: Handle,
    [mut to, mut from]: [u64; 2],
    bytes: usize,
) -> Result<(), DriverError> {
    let mut count = u32::try_from(bytes / 4).unwrap_or(0);
    let mut parameters: [*mut c_void; 3] = [
        (&raw mut to).cast(),
        (&raw mut from).cast(),
        (&raw mut count).cast(),
    ];
    program.driver.cuLaunchKernel(
        function,
        BLOCKS,
        1,
        1,
        THREADS,
        1,
        1,
        0,
        program.stream,
        parameters.as_mut_ptr(),
        null_mut::<*mut c_void>(),
    )?;
    program.wait()
}
