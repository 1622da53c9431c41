//! Raises the exception that word 0 selects, so that a test can check the monitor's report: 0 reads
//! an unmapped address, 1 executes an undefined instruction, 2 writes to code, 3 executes data,
//! 4 writes to the address in word 1.
#![no_std]
#![no_main]

use core::arch::asm;

use wormhole_payload::{Parameters, entry};

entry!(main);

static mut DATA: [u8; 16] = [0xc3; 16];

fn main(parameters: Parameters, _vcpu: u64) -> u32 {
    let fault = parameters.load(0);
    let target = match fault {
        0 => 0x7000_0000_1000,
        2 => main as fn(Parameters, u64) -> u32 as usize as u64,
        3 => (&raw const DATA).addr() as u64,
        _ => parameters.load(1),
    };
    // SAFETY: each of these raises an exception, which ends the payload, so that none returns.
    unsafe {
        match fault {
            0 => asm!("mov rax, [{}]", in(reg) target, out("rax") _),
            1 => asm!("ud2"),
            3 => asm!("call {}", in(reg) target, clobber_abi("C")),
            _ => asm!("mov qword ptr [{}], 1", in(reg) target),
        }
    }
    0
}
