//! How a VM ended.

use std::fmt;
use std::time::Duration;

/// The registers that tell where a vCPU was.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Registers {
    /// Instruction pointer.
    pub rip: u64,
    /// Stack pointer.
    pub rsp: u64,
    /// The last page fault's address.
    pub cr2: u64,
    /// Page tables.
    pub cr3: u64,
    /// Code segment selector; its low two bits are the privilege level.
    pub cs: u16,
}

impl fmt::Display for Registers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "RIP {:#x}, RSP {:#x}, CR2 {:#x}, CR3 {:#x}, privilege level {}",
            self.rip,
            self.rsp,
            self.cr2,
            self.cr3,
            self.cs & 3
        )
    }
}

/// How a VM ended. Only [`ExitReason::Exited`] and [`ExitReason::PoweredOff`] are orderly ends.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ExitReason {
    /// The guest wrote its exit status and ended.
    #[error("the guest ended with status {status}")]
    Exited {
        /// What it wrote to the exit-status port.
        status: u32,
    },
    /// The guest switched itself off without an exit status.
    #[error("the guest switched itself off without saying how its program ended")]
    PoweredOff,
    /// The guest reset itself without a word.
    #[error("the guest reset itself without saying how its program ended")]
    Reset,
    /// The guest's kernel panicked.
    #[error("the guest's kernel panicked: {line}")]
    Panicked {
        /// The line in which it said so.
        line: String,
    },
    /// The guest's kernel died for want of memory.
    #[error("the guest ran out of memory: {line}")]
    OutOfMemory {
        /// The line in which it said so.
        line: String,
    },
    /// The watchdog ended it.
    #[error("the guest did not end within {} s and was stopped", .after.as_secs_f32())]
    TimedOut {
        /// The time it had.
        after: Duration,
    },
    /// The caller ended it.
    #[error("the guest was stopped")]
    Stopped,
    /// A processor could not handle an exception while it handled an exception.
    #[error("vCPU {vcpu} shut down (triple fault) at {registers}")]
    TripleFault {
        /// Which processor.
        vcpu: u8,
        /// Where it was; on AMD processors newer kernels report the state after reset.
        registers: Registers,
    },
    /// A payload ran into an exception.
    #[error(
        "the payload on vCPU {vcpu} ran into exception {vector} ({}), error code {error_code:#x}, \
         at {registers}",
        exception_name(*vector)
    )]
    PayloadException {
        /// Which processor.
        vcpu: u8,
        /// The exception's vector.
        vector: u8,
        /// Its error code, 0 if it has none.
        error_code: u64,
        /// Where the payload was.
        registers: Registers,
    },
    /// KVM gave up.
    #[error(
        "KVM cannot go on with vCPU {vcpu}: internal error, suberror {suberror}, at {registers}; \
         if this KVM cannot run Linux guests, use --host emulated"
    )]
    InternalError {
        /// Which processor.
        vcpu: u8,
        /// KVM's detail; 1 is a failed emulation.
        suberror: u32,
        /// Where the guest was.
        registers: Registers,
    },
    /// The hardware refused the guest's state.
    #[error("vCPU {vcpu} cannot be entered: the hardware says {reason:#x} (on CPU {cpu})")]
    EntryFailed {
        /// Which processor.
        vcpu: u8,
        /// The hardware's reason.
        reason: u64,
        /// The host's processor.
        cpu: u32,
    },
    /// An exit nobody knows.
    #[error("vCPU {vcpu} stopped with an exit that this monitor does not handle: {exit}")]
    UnexpectedExit {
        /// Which processor.
        vcpu: u8,
        /// KVM's exit, in words.
        exit: String,
    },
    /// KVM_RUN itself failed.
    #[error("KVM cannot run vCPU {vcpu}: {error}")]
    RunFailed {
        /// Which processor.
        vcpu: u8,
        /// The system's error.
        error: String,
    },
}

impl ExitReason {
    /// The guest's exit status, if it told one.
    pub fn status(&self) -> Option<u32> {
        match self {
            Self::Exited { status } => Some(*status),
            _ => None,
        }
    }
}

/// The name of a processor exception (Intel SDM volume 3, table 6-1).
fn exception_name(vector: u8) -> &'static str {
    match vector {
        0 => "divide error",
        1 => "debug",
        2 => "NMI",
        3 => "breakpoint",
        4 => "overflow",
        5 => "bound range",
        6 => "invalid opcode",
        7 => "device not available",
        8 => "double fault",
        10 => "invalid TSS",
        11 => "segment not present",
        12 => "stack fault",
        13 => "general protection",
        14 => "page fault",
        16 => "x87 error",
        17 => "alignment check",
        18 => "machine check",
        19 => "SIMD error",
        21 => "control protection",
        _ => "reserved",
    }
}

/// Everything known after a VM has ended.
#[derive(Debug, Clone)]
pub struct Report {
    /// How it ended.
    pub outcome: ExitReason,
    /// How long it ran.
    pub duration: Duration,
    /// The console's last lines, oldest first.
    pub console_tail: Vec<String>,
    /// The line in which the guest's kernel said that it killed a process for want of memory.
    pub out_of_memory: Option<String>,
    /// Exits to the monitor, counted per reason over all vCPUs.
    pub exits: crate::vcpu::ExitCounts,
    /// Accesses to ports and memory that no device claims.
    pub unclaimed_accesses: u64,
    /// Exits of all vCPUs, by what the guest said it was doing ([`crate::exit_accounting`]); a payload says nothing.
    pub exit_accounts: [u64; crate::exit_accounting::COUNT],
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outcomes_are_sentences_with_their_data() {
        let registers = Registers {
            rip: 0x1234,
            cr2: 0xdead_0000,
            cs: 0x33,
            ..Default::default()
        };
        let text = ExitReason::PayloadException {
            vcpu: 1,
            vector: 14,
            error_code: 4,
            registers,
        }
        .to_string();
        for part in ["vCPU 1", "page fault", "0x1234", "0xdead0000", "level 3"] {
            assert!(text.contains(part), "{part} is missing in: {text}");
        }
        let text = ExitReason::TimedOut {
            after: Duration::from_millis(1500),
        }
        .to_string();
        assert!(text.contains("1.5 s"), "{text}");
    }
}
