//! Lists of system calls, and filters made of them.

use std::collections::BTreeMap;

use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition,
    SeccompFilter, SeccompRule,
};

/// Why there is no filter.
#[derive(Debug, thiserror::Error)]
pub enum FilterError {
    /// The list is no program that the kernel could take.
    #[error("the system call filter does not compile")]
    Compile(#[from] BackendError),
    /// The kernel has no filters, or another thread has one that this one does not have.
    #[error("the kernel does not take the system call filter")]
    Install(#[from] seccompiler::Error),
}

/// What happens to a call that is on no list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Denial {
    /// It fails with this error number.
    Fails(i32),
    /// SIGSYS comes in its place: see [`crate::report_denied_calls`].
    Signal,
}

/// What `pthread_create` asks of `clone`.
const THREAD_FLAGS: u64 = (libc::CLONE_VM | libc::CLONE_THREAD | libc::CLONE_SIGHAND) as u64;
const NAMESPACE_FLAGS: u64 = (libc::CLONE_NEWNS
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWCGROUP) as u64;

/// System calls by number, each with rules on its arguments: one of them must hold. No rules: any arguments.
type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// The system calls that a thread may make.
#[derive(Clone, Debug, Default)]
pub struct Calls {
    allowed: Rules,
    absent: Rules,
}

impl Calls {
    /// These calls with any arguments.
    pub fn any(calls: &[i64]) -> Self {
        Self::default().and(calls)
    }

    /// And these calls with any arguments.
    #[must_use]
    pub fn and(mut self, calls: &[i64]) -> Self {
        for &call in calls {
            self.allowed.insert(call, Vec::new());
        }
        self
    }

    /// And this call, where one of `rules` holds.
    #[must_use]
    pub fn and_where(mut self, call: i64, rules: Vec<SeccompRule>) -> Self {
        add(&mut self.allowed, call, rules);
        self
    }

    /// And new threads of this process, in no new namespace.
    ///
    /// # Errors
    /// Never.
    pub fn and_threads(self) -> Result<Self, FilterError> {
        let flags = masked(0, THREAD_FLAGS | NAMESPACE_FLAGS, THREAD_FLAGS)?;
        // libc falls back from `clone3` to `clone`, whose flags a filter can read.
        Ok(self
            .and_where(libc::SYS_clone, vec![flags])
            .without(&[libc::SYS_clone3]))
    }

    /// And all calls of another list.
    #[must_use]
    pub fn and_all(mut self, other: Self) -> Self {
        for (call, rules) in other.allowed {
            add(&mut self.allowed, call, rules);
        }
        for (call, rules) in other.absent {
            add(&mut self.absent, call, rules);
        }
        self
    }

    /// These calls fail as on a system without them, for libraries that have another way then.
    #[must_use]
    pub fn without(mut self, calls: &[i64]) -> Self {
        for &call in calls {
            self.absent.insert(call, Vec::new());
        }
        self
    }

    /// This call fails as on a system without it, where one of `rules` holds.
    #[must_use]
    pub fn without_where(mut self, call: i64, rules: Vec<SeccompRule>) -> Self {
        add(&mut self.absent, call, rules);
        self
    }

    /// Makes the filter.
    ///
    /// # Errors
    /// The list is too long for the kernel, or empty.
    pub fn compile(mut self, denial: Denial) -> Result<Filter, FilterError> {
        let architecture = std::env::consts::ARCH.try_into()?;
        let mut programs = Vec::new();
        if !self.absent.is_empty() {
            for &call in self.absent.keys() {
                // The filter of absent calls answers; the list does not get to deny them.
                self.allowed.entry(call).or_default();
            }
            let missing = SeccompAction::Errno(libc::ENOSYS.unsigned_abs());
            let absent =
                SeccompFilter::new(self.absent, SeccompAction::Allow, missing, architecture)?;
            programs.push(absent.try_into()?);
        }
        let denied = match denial {
            Denial::Fails(error) => SeccompAction::Errno(error.unsigned_abs()),
            Denial::Signal => SeccompAction::Trap,
        };
        let allowed = SeccompFilter::new(self.allowed, denied, SeccompAction::Allow, architecture)?;
        // The list of what is allowed comes last: nothing can be installed after it.
        programs.push(allowed.try_into()?);
        Ok(Filter(programs))
    }
}

/// Adds a call's rules to those that are there. Without rules it stays, or becomes, a call with any arguments.
fn add(to: &mut Rules, call: i64, rules: Vec<SeccompRule>) {
    match to.get_mut(&call) {
        Some(there) if there.is_empty() || rules.is_empty() => there.clear(),
        Some(there) => there.extend(rules),
        None => {
            to.insert(call, rules);
        }
    }
}

/// Programs of the kernel's filter, in the order in which they are installed. Each must agree for a call to happen.
#[derive(Clone, Debug)]
pub struct Filter(Vec<BpfProgram>);

impl Filter {
    /// Leaves this thread, and those that it starts, the calls of the list. Allocates nothing, so that a process that
    /// was just cloned may call it. The thread gains no privileges by execve(2) any more.
    ///
    /// # Errors
    /// The kernel has no filters.
    pub fn install(&self) -> Result<(), FilterError> {
        for program in &self.0 {
            seccompiler::apply_filter(program)?;
        }
        Ok(())
    }

    /// Leaves all threads of this process the calls of the list.
    ///
    /// # Errors
    /// The kernel has no filters, or a thread has one that this thread does not have.
    pub fn install_on_all_threads(&self) -> Result<(), FilterError> {
        for program in &self.0 {
            seccompiler::apply_filter_all_threads(program)?;
        }
        Ok(())
    }
}

/// The argument's lower half is `value`.
///
/// # Errors
/// There is no such argument.
pub fn equals(argument: u8, value: u64) -> Result<SeccompRule, FilterError> {
    all_equal(&[(argument, value)])
}

/// The lower half of each of these arguments is the value beside it.
///
/// # Errors
/// There is no such argument.
pub fn all_equal(arguments: &[(u8, u64)]) -> Result<SeccompRule, FilterError> {
    let conditions = arguments
        .iter()
        .map(|&(argument, value)| {
            SeccompCondition::new(argument, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, value)
        })
        .collect::<Result<_, _>>()?;
    Ok(SeccompRule::new(conditions)?)
}

/// Of the argument's bits `bits` those of `value` are set and the others are not.
///
/// # Errors
/// There is no such argument.
pub fn masked(argument: u8, bits: u64, value: u64) -> Result<SeccompRule, FilterError> {
    let kind = SeccompCmpOp::MaskedEq(bits);
    rule(argument, SeccompCmpArgLen::Qword, kind, value)
}

/// The argument's lower half is not greater than `value`.
///
/// # Errors
/// There is no such argument.
pub fn at_most(argument: u8, value: u64) -> Result<SeccompRule, FilterError> {
    rule(argument, SeccompCmpArgLen::Dword, SeccompCmpOp::Le, value)
}

fn rule(
    argument: u8,
    length: SeccompCmpArgLen,
    kind: SeccompCmpOp,
    value: u64,
) -> Result<SeccompRule, FilterError> {
    let condition = SeccompCondition::new(argument, length, kind, value)?;
    Ok(SeccompRule::new(vec![condition])?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_that_one_list_has_with_any_arguments_stays_so() {
        let some = || Calls::default().and_where(1, vec![equals(0, 7).unwrap()]);
        for both in [
            some().and_all(Calls::any(&[1])),
            Calls::any(&[1]).and_all(some()),
        ] {
            assert!(both.allowed[&1].is_empty());
        }
        assert_eq!(some().and_all(some()).allowed[&1].len(), 2);
    }

    #[test]
    fn a_filter_without_absent_calls_is_one_program() {
        let programs = |calls: Calls| calls.compile(Denial::Signal).unwrap().0.len();
        assert_eq!(programs(Calls::any(&[1])), 1);
        assert_eq!(programs(Calls::any(&[1]).without(&[2])), 2);
    }
}
