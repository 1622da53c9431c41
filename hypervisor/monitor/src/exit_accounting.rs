//! Counts VM exits by account. A program in the guest selects the account.
//!
//! The program writes an account's number to [`PORT`]; exits of all vCPUs count in that account until
//! it writes another number. A benchmark can thus compare the exits of its workload with those of a
//! control run of the same duration. Each write is an exit itself and counts in the account that it ends.
//!
//! The exits of the VM that serves the program, if there is one, count in the same accounts beside.

use std::fmt;

use crate::bus::{BusDevice, Effect};

/// Port to which a guest writes the account's number, one byte. No PC device that Linux probes uses it.
pub const PORT: u16 = 0xf5;

/// Number of accounts. Exits in an account with a higher number are not counted.
pub const COUNT: usize = 4;

/// Exits by account.
pub type Accounts = [u64; COUNT];

/// Reads the numbers of exits so far, of this VM and of the VM that serves it; `None` if they cannot be read.
type Exits = Box<dyn Fn() -> Option<[u64; 2]> + Send>;

/// The port device that counts exits by account.
pub(crate) struct ExitAccounting {
    exits: Exits,
    account: usize,
    /// Numbers of exits when the current account began.
    before: [u64; 2],
    entered: [Accounts; 2],
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
    pub fn new(exits: impl Fn() -> Option<[u64; 2]> + Send + 'static) -> Self {
        Self {
            exits: Box::new(exits),
            account: 0,
            before: [0; 2],
            entered: [[0; COUNT]; 2],
        }
    }

    /// Adds the exits since the last change to the current account, then switches to `account`.
    fn change(&mut self, account: u8) {
        let Some(now) = (self.exits)() else {
            return;
        };
        let since = now.into_iter().zip(self.before);
        for (accounts, (now, before)) in self.entered.iter_mut().zip(since) {
            if let Some(entered) = accounts.get_mut(self.account) {
                *entered += now.saturating_sub(before);
            }
        }
        self.before = now;
        self.account = account.into();
    }

    /// Returns the exits of each account, of this VM and of the one that serves it, without those since the last change.
    pub fn entered(&self) -> [Accounts; 2] {
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
    fn entered(changes: &[(u8, u64)]) -> Accounts {
        let exits = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&exits);
        let mut accounts = ExitAccounting::new(move || {
            let now = counted.load(Ordering::Relaxed);
            Some([now, 1000 + 2 * now])
        });
        for (account, now) in changes {
            exits.store(*now, Ordering::Relaxed);
            accounts.write(0, &[*account]);
        }
        let [own, other] = accounts.entered();
        assert_eq!(other[0], 1000 + 2 * own[0]);
        assert_eq!(
            other[1..],
            own[1..].iter().map(|own| 2 * own).collect::<Vec<_>>()
        );
        own
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
        let mut accounts = ExitAccounting::new(|| Some([7, 7]));
        assert_eq!(accounts.write(0, &[]), Effect::Continue);
        assert_eq!(accounts.entered(), [[0; COUNT]; 2]);
    }

    #[test]
    fn an_account_that_is_not_there_takes_nothing() {
        assert_eq!(entered(&[(u8::MAX, 10), (3, 50), (0, 51)]), [10, 0, 0, 1]);
    }
}
