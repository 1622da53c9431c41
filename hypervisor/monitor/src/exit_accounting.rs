//! Counts VM exits by account. A program in the guest selects the account.
//!
//! The program writes an account's number to [`PORT`]; exits of all vCPUs count in that account until
//! it writes another number. A benchmark can thus compare the exits of its workload with those of a
//! control run of the same duration. Each write is an exit itself and counts in the account that it ends.

use std::fmt;

use crate::bus::{BusDevice, Effect};

/// Port to which a guest writes the account's number, one byte. No PC device that Linux probes uses it.
pub const PORT: u16 = 0xf5;

/// Number of accounts. Exits in an account with a higher number are not counted.
pub const COUNT: usize = 4;

/// Reads the number of exits so far; `None` if it cannot be read.
type Exits = Box<dyn Fn() -> Option<u64> + Send>;

/// The port device that counts exits by account.
pub(crate) struct ExitAccounting {
    exits: Exits,
    account: usize,
    /// Number of exits when the current account began.
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
    /// Starts with account 0.
    pub fn new(exits: impl Fn() -> Option<u64> + Send + 'static) -> Self {
        Self {
            exits: Box::new(exits),
            account: 0,
            before: 0,
            entered: [0; COUNT],
        }
    }

    /// Adds the exits since the last change to the current account, then switches to `account`.
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

    /// Returns the exits of each account, without those since the last change.
    pub fn entered(&self) -> [u64; COUNT] {
        self.entered
    }
}

impl BusDevice for ExitAccounting {
    /// Fills `data` with ones: the port is write-only.
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

    /// Returns the counts after the guest switches accounts. `changes` holds each new account and the number of exits
    /// at
    /// that time.
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
