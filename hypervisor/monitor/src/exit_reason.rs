//! Describes the end of a VM: exit reason, registers, report.

use std::fmt;
use std::time::Duration;

/// Registers of a vCPU when it stopped.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Registers {
    /// Instruction pointer.
    pub rip: u64,
    /// Stack pointer.
    pub rsp: u64,
    /// Address of the last page fault.
    pub cr2: u64,
    /// Address of the page tables.
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

/// Reason for which a VM ended. Only [`ExitReason::Exited`] and [`ExitReason::PoweredOff`] are orderly ends.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ExitReason {
    /// The guest wrote its exit status and ended.
    #[error("the guest ended with status {status}")]
    Exited {
        /// Value written to the exit-status port.
        status: u32,
    },
    /// The guest powered off without an exit status.
    #[error("the guest switched itself off without saying how its program ended")]
    PoweredOff,
    /// The guest reset itself without an exit status.
    #[error("the guest reset itself without saying how its program ended")]
    Reset,
    /// The guest's kernel panicked.
    #[error("the guest's kernel panicked: {line}")]
    Panicked {
        /// The console line that reports it.
        line: String,
    },
    /// The guest's kernel panicked because it ran out of memory.
    #[error("the guest ran out of memory: {line}")]
    OutOfMemory {
        /// The console line that reports it.
        line: String,
    },
    /// The watchdog stopped the VM.
    #[error("the guest did not end within {} s and was stopped", .after.as_secs_f32())]
    TimedOut {
        /// The timeout.
        after: Duration,
    },
    /// The caller stopped the VM.
    #[error("the guest was stopped")]
    Stopped,
    /// An exception during the delivery of a double fault shut down a vCPU.
    #[error("vCPU {vcpu} shut down (triple fault) at {registers}")]
    TripleFault {
        /// Number of the vCPU.
        vcpu: u8,
        /// The vCPU's registers. On AMD processors newer host kernels report the state after reset.
        registers: Registers,
    },
    /// A payload raised an exception.
    #[error(
        "the payload on vCPU {vcpu} ran into exception {vector} ({}), error code {error_code:#x}, \
         at {registers}",
        exception_name(*vector)
    )]
    PayloadException {
        /// Number of the vCPU.
        vcpu: u8,
        /// Vector of the exception.
        vector: u8,
        /// Error code of the exception, 0 if it has none.
        error_code: u64,
        /// Registers of the payload at the exception.
        registers: Registers,
    },
    /// KVM reported KVM_EXIT_INTERNAL_ERROR.
    #[error(
        "KVM cannot go on with vCPU {vcpu}: internal error, suberror {suberror}, at {registers}; \
         if this KVM cannot run Linux guests, use --host emulated"
    )]
    InternalError {
        /// Number of the vCPU.
        vcpu: u8,
        /// Suberror from KVM; 1 is a failed emulation.
        suberror: u32,
        /// Registers of the guest.
        registers: Registers,
    },
    /// The hardware refused the guest's state (KVM_EXIT_FAIL_ENTRY).
    #[error("vCPU {vcpu} cannot be entered: the hardware says {reason:#x} (on CPU {cpu})")]
    EntryFailed {
        /// Number of the vCPU.
        vcpu: u8,
        /// Failure reason from the hardware.
        reason: u64,
        /// Number of the host CPU.
        cpu: u32,
    },
    /// KVM returned an exit that this monitor does not handle.
    #[error("vCPU {vcpu} stopped with an exit that this monitor does not handle: {exit}")]
    UnexpectedExit {
        /// Number of the vCPU.
        vcpu: u8,
        /// Debug representation of the exit.
        exit: String,
    },
    /// KVM_RUN failed, or the vCPU's thread could not be confined.
    #[error("KVM cannot run vCPU {vcpu}: {error}")]
    RunFailed {
        /// Number of the vCPU.
        vcpu: u8,
        /// Description of the error.
        error: String,
    },
}

impl ExitReason {
    /// Returns the guest's exit status, if it wrote one.
    pub fn status(&self) -> Option<u32> {
        match self {
            Self::Exited { status } => Some(*status),
            _ => None,
        }
    }
}

/// Returns the name of a processor exception (Intel SDM volume 3, table 6-1).
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

/// Result of a VM's run.
#[derive(Debug, Clone)]
pub struct Report {
    /// Reason for which the VM ended.
    pub outcome: ExitReason,
    /// Time from the start of the vCPUs to the end.
    pub duration: Duration,
    /// Last lines of the console, oldest first.
    pub console_tail: Vec<String>,
    /// First console line with which the guest's kernel reports that memory ran out.
    pub out_of_memory: Option<String>,
    /// Exits to the monitor, counted per reason over all vCPUs.
    pub exits: crate::vcpu::ExitCounts,
    /// Number of accesses to ports and memory that no device claims.
    pub unclaimed_accesses: u64,
    /// Exits of all vCPUs, by the account that the guest selected ([`crate::exit_accounting`]), and those of the VM that
    /// serves it.
    pub exit_accounts: [crate::exit_accounting::Accounts; 2],
    /// Bytes of RAM that the guest reported as free and the host took back. A page may count several times.
    pub reclaimed_bytes: u64,
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
