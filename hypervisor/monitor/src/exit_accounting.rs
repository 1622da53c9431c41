//! VM exits by account, which a program in the guest selects.
//!
//! The program writes an account's number to [`PORT`]; exits of all vCPUs count there until it writes
//! another number. So the exits of its work can be compared with those of a control that takes as long.
//! Each write is an exit itself and counts in the account that it ends.

use std::fmt;

use crate::bus::{BusDevice, Effect};

/// Where a guest writes the account's number, one byte. Not used by any PC device that Linux probes.
pub const PORT: u16 = 0xf5;

/// Number of accounts. Exits in an account of a higher number count nowhere.
pub const COUNT: usize = 4;

/// How many exits there were so far; none if that cannot be told.
type Exits = Box<dyn Fn() -> Option<u64> + Send>;

/// Exits by account.
pub(crate) struct ExitAccounting {
    exits: Exits,
    account: usize,
    /// The exits before those that are entered there.
    before: u64,
    entered: [u64; COUNT],
}

impl fmt::Debug for ExitAccounting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExitAccounting")
            .field("account", &self.account)
            .field("entered", &self.entered)
            .finish_non_exhaustive()
    }
}

impl ExitAccounting {
    /// All exits go to account 0 at first.
    pub fn new(exits: impl Fn() -> Option<u64> + Send + 'static) -> Self {
        Self {
            exits: Box::new(exits),
            account: 0,
            before: 0,
            entered: [0; COUNT],
        }
    }

    /// Enters what comes now in another account.
    fn change(&mut self, account: u8) {
        let Some(now) = (self.exits)() else {
            return;
        };
        if let Some(entered) = self.entered.get_mut(self.account) {
            *entered += now.saturating_sub(self.before);
        }
        self.before = now;
        self.account = account.into();
    }

    /// What was entered in accounts that have ended since.
    pub fn entered(&self) -> [u64; COUNT] {
        self.entered
    }
}

impl BusDevice for ExitAccounting {
    /// Nothing is to be read.
    fn read(&mut self, _: u64, data: &mut [u8]) {
        data.fill(0xff);
    }

    fn write(&mut self, _: u64, data: &[u8]) -> Effect {
        if let Some(account) = data.first() {
            self.change(*account);
        }
        Effect::Continue
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    /// What is entered when the guest changes to these accounts after so many exits.
    fn entered(changes: &[(u8, u64)]) -> [u64; COUNT] {
        let exits = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&exits);
        let mut accounts = ExitAccounting::new(move || Some(counted.load(Ordering::Relaxed)));
        for (account, now) in changes {
            exits.store(*now, Ordering::Relaxed);
            accounts.write(0, &[*account]);
        }
        accounts.entered()
    }

    #[test]
    fn exits_are_entered_where_the_guest_says() {
        assert_eq!(
            entered(&[(1, 100), (0, 107), (2, 150), (0, 155), (1, 160), (0, 162)]),
            [100 + 43 + 5, 7 + 2, 5, 0]
        );
    }

    #[test]
    fn a_write_of_nothing_changes_no_account() {
        let mut accounts = ExitAccounting::new(|| Some(7));
        assert_eq!(accounts.write(0, &[]), Effect::Continue);
        assert_eq!(accounts.entered(), [0; COUNT]);
    }

    #[test]
    fn an_account_that_is_not_there_takes_nothing() {
        assert_eq!(entered(&[(u8::MAX, 10), (3, 50), (0, 51)]), [10, 0, 0, 1]);
    }
}
