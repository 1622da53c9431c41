//! Writes the exception handlers of a payload's VM, its only supervisor code.
//!
//! A handler pushes an error code if the processor has not, pushes the vector, and writes to
//! [`PORT`]. The monitor then reads the handler's stack.

use vm_memory::{Bytes, GuestAddress, GuestMemoryError};

use crate::exit_reason::{ExitReason, Registers};
use crate::ram::GuestRam;

/// Port to which a handler writes after it has pushed the vector.
pub(super) const PORT: u16 = 0xf5;

const HANDLERS: u64 = 0x10_0000;
const HANDLER_BYTES: u64 = 16;
const VECTORS: u8 = 32;
const IDT: u64 = 0x10_1000;
const GDT: u64 = 0x10_2000;
const TASK_STATES: u64 = 0x10_4000;
const TASK_STATE_BYTES: u64 = 0x80;
const STACKS: u64 = 0x11_0000;
const STACK_BYTES: u64 = 0x1000;

/// Selectors in the GDT that [`write`] writes.
pub(super) const SUPERVISOR_CODE: u16 = 0x08;
pub(super) const USER_CODE: u16 = 0x18 | 3;
pub(super) const USER_DATA: u16 = 0x20 | 3;

/// Base addresses and limits for the system registers.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tables {
    pub gdt: (u64, u16),
    pub idt: (u64, u16),
    pub task_state: u64,
}

/// Writes handlers and tables for vCPU `vcpu`. Rewrites the tables that all vCPUs share.
pub(super) fn write(ram: &GuestRam, vcpu: u8) -> Result<Tables, GuestMemoryError> {
    for vector in 0..VECTORS {
        let handler = HANDLERS + u64::from(vector) * HANDLER_BYTES;
        ram.write_slice(&handler_code(vector), GuestAddress(handler))?;
        ram.write_slice(&gate(handler), GuestAddress(IDT + 16 * u64::from(vector)))?;
    }
    const DESCRIPTORS: [u64; 5] = [
        0,
        0x00af_9b00_0000_ffff, // supervisor code
        0x00cf_9300_0000_ffff, // supervisor data
        0x00af_fb00_0000_ffff, // user code
        0x00cf_f300_0000_ffff, // user data
    ];
    for (index, descriptor) in (0..).zip(DESCRIPTORS) {
        ram.write_obj(descriptor, GuestAddress(GDT + 8 * index))?;
    }
    let task_state = TASK_STATES + u64::from(vcpu) * TASK_STATE_BYTES;
    let stack = STACKS + (u64::from(vcpu) + 1) * STACK_BYTES;
    ram.write_obj(stack, GuestAddress(task_state + 4))?; // RSP0
    ram.write_obj(stack, GuestAddress(task_state + 36))?; // IST1
    Ok(Tables {
        gdt: (GDT, 8 * 5 - 1),
        idt: (IDT, 16 * u16::from(VECTORS) - 1),
        task_state,
    })
}

/// Reads the exception from the stack of the handler that wrote to [`PORT`].
pub(super) fn outcome(ram: &GuestRam, vcpu: u8, registers: Registers) -> ExitReason {
    let word = |index: u64| {
        registers
            .rsp
            .checked_add(8 * index)
            .and_then(|address| ram.read_obj::<u64>(GuestAddress(address)).ok())
            .unwrap_or(0)
    };
    ExitReason::PayloadException {
        vcpu,
        vector: word(0).to_le_bytes()[0],
        error_code: word(1),
        registers: Registers {
            rip: word(2),
            rsp: word(5),
            cs: u16::from_le_bytes([word(3).to_le_bytes()[0], word(3).to_le_bytes()[1]]),
            ..registers
        },
    }
}

/// Assembles `push 0` (unless the processor pushes an error code); `push vector`; `out PORT, al`;
/// `hlt`; and a jump back to `hlt`.
fn handler_code(vector: u8) -> Vec<u8> {
    let mut code = Vec::new();
    if !matches!(vector, 8 | 10..=14 | 17 | 21 | 29 | 30) {
        code.extend([0x6a, 0]);
    }
    code.extend([0x6a, vector, 0xe6, PORT.to_le_bytes()[0], 0xf4, 0xeb, 0xfd]);
    code
}

/// Returns an interrupt gate that user code may also call by `int`, on the stack of IST1.
fn gate(handler: u64) -> [u8; 16] {
    let [a0, a1, a2, a3, a4, a5, a6, a7] = handler.to_le_bytes();
    let [s0, s1] = SUPERVISOR_CODE.to_le_bytes();
    [a0, a1, s0, s1, 1, 0xee, a2, a3, a4, a5, a6, a7, 0, 0, 0, 0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stack_tells_vector_code_and_place() {
        let ram = crate::ram::test_ram(2 << 20);
        let rsp = 0x11_0f00;
        for (index, word) in (0..).zip([14u64, 6, 0x40_1234, 0x1b, 2, 0x77_0000, 0x23]) {
            ram.write_obj(word, GuestAddress(rsp + 8 * index))
                .expect("stack");
        }
        let registers = Registers {
            rsp,
            cr2: 0xbad_0000,
            ..Registers::default()
        };
        let ExitReason::PayloadException {
            vector,
            error_code,
            registers,
            ..
        } = outcome(&ram, 0, registers)
        else {
            panic!("not an exception");
        };
        assert_eq!((vector, error_code), (14, 6));
        assert_eq!((registers.rip, registers.rsp), (0x40_1234, 0x77_0000));
        assert_eq!((registers.cr2, registers.cs & 3), (0xbad_0000, 3));
    }

    #[test]
    fn a_hostile_stack_pointer_is_harmless() {
        let ram = crate::ram::test_ram(2 << 20);
        for rsp in [u64::MAX, u64::MAX - 8, 0x20_0000 - 4] {
            let registers = Registers {
                rsp,
                ..Registers::default()
            };
            assert!(matches!(
                outcome(&ram, 0, registers),
                ExitReason::PayloadException { .. }
            ));
        }
    }
}
