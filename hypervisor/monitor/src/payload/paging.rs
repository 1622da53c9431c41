//! Builds page tables of 2 MiB pages.

use vm_memory::{Bytes, GuestAddress, GuestMemoryError};

use crate::ram::GuestRam;

/// Bytes of a page.
pub(super) const PAGE: u64 = 2 << 20;
const TABLE: u64 = 4096;
const PRESENT: u64 = 1;
const WRITABLE: u64 = 1 << 1;
const USER: u64 = 1 << 2;
const LARGE: u64 = 1 << 7;
const NO_EXECUTE: u64 = 1 << 63;
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

/// Permissions of a page. Its caching is write-back, as in the PAT's first entry.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Access {
    pub user: bool,
    pub writable: bool,
    pub executable: bool,
}

/// Error from mapping a page.
#[derive(Debug, thiserror::Error)]
pub(super) enum PagingError {
    #[error("the page tables are full")]
    Full,
    #[error("the page tables cannot be written")]
    Write(#[from] GuestMemoryError),
}

/// Page tables, allocated from a range of guest memory.
pub(super) struct PageTables<'a> {
    ram: &'a GuestRam,
    root: u64,
    next: u64,
    end: u64,
}

impl<'a> PageTables<'a> {
    /// Creates empty tables between `start` and `end`. The memory must be zero.
    pub fn new(ram: &'a GuestRam, start: u64, end: u64) -> Self {
        Self {
            ram,
            root: start,
            next: start + TABLE,
            end,
        }
    }

    /// Returns the address for CR3.
    pub fn root(&self) -> u64 {
        self.root
    }

    /// Maps the page at `address` to guest physical address `physical`; both are multiples of the page size.
    pub fn map(&mut self, address: u64, physical: u64, access: Access) -> Result<(), PagingError> {
        let pdpt = self.descend(self.root, address >> 39)?;
        let directory = self.descend(pdpt, address >> 30)?;
        let mut entry = physical | PRESENT | LARGE;
        for (on, bit) in [
            (access.user, USER),
            (access.writable, WRITABLE),
            (!access.executable, NO_EXECUTE),
        ] {
            if on {
                entry |= bit;
            }
        }
        self.ram
            .write_obj(entry, entry_address(directory, address >> 21))?;
        Ok(())
    }

    /// Returns the table that an entry refers to; allocates it if the entry is not present.
    fn descend(&mut self, table: u64, index: u64) -> Result<u64, PagingError> {
        let at = entry_address(table, index);
        let entry: u64 = self.ram.read_obj(at)?;
        if entry & PRESENT != 0 {
            return Ok(entry & ADDRESS);
        }
        if self.next + TABLE > self.end {
            return Err(PagingError::Full);
        }
        let below = self.next;
        self.next += TABLE;
        // Upper levels grant all permissions; the page's entry restricts them.
        self.ram.write_obj(below | PRESENT | WRITABLE | USER, at)?;
        Ok(below)
    }
}

fn entry_address(table: u64, index: u64) -> GuestAddress {
    GuestAddress(table + 8 * (index & 511))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mapped_page_is_found_and_full_tables_are_reported() {
        let ram = crate::ram::test_ram(1 << 20);
        let mut tables = PageTables::new(&ram, 0x1000, 0x6000);
        let access = Access {
            user: true,
            ..Access::default()
        };
        tables
            .map(0x5000_0000_0000, 4 << 30, access)
            .expect("first");
        tables
            .map(0x5000_0020_0000, (4 << 30) + PAGE, access)
            .expect("same directory");
        let read = |address| ram.read_obj::<u64>(GuestAddress(address)).expect("ram");
        let pdpt = read(0x1000 + 8 * (0x5000_0000_0000 >> 39)) & ADDRESS;
        let directory = read(pdpt) & ADDRESS;
        assert_eq!(
            read(directory),
            4 << 30 | PRESENT | LARGE | USER | NO_EXECUTE
        );
        assert_eq!(read(directory + 8) & ADDRESS, (4 << 30) + PAGE);
        tables.map(0, 0, access).expect("two more tables");
        assert!(matches!(
            tables.map(0x7000_0000_0000, 0, access),
            Err(PagingError::Full)
        ));
    }
}
