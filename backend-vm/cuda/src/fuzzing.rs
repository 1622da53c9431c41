//! Processing of a guest's image up to the driver, for the fuzz target.

use std::borrow::Cow;

use wormhole_device::{ManagedPlace, Result};
use wormhole_fatbin::Entry;

use crate::code::{Alternative, Budget, Code, alternatives};
use crate::{elf, managed};

/// Greatest announced size of an entry; larger ones are skipped to save time.
const MOST_BYTES: u64 = 1 << 20;
/// Address of the managed variables.
const START: u64 = 0x7000_0000_0000;

/// Processes an image as a device of compute capability 9.0 does.
///
/// # Panics
/// The driver would get something else than a whole ELF file, or text with one zero byte, at its end.
pub fn take_apart(image: &[u8], force_ptx: bool) {
    let Ok(ways) = alternatives(image, 90, force_ptx) else {
        return;
    };
    let budget = Budget::default();
    for way in ways {
        match way {
            Alternative::Plain(bytes) => check(Code::new(Cow::Borrowed(bytes))),
            Alternative::Entry(entry) => unpack(&budget, &entry),
            Alternative::Linked(entries) => {
                for entry in entries {
                    unpack(&budget, &entry);
                }
            }
        }
    }
}

fn unpack(budget: &Budget, entry: &Entry<'_>) {
    if entry.unpacked_bytes() <= MOST_BYTES {
        check(budget.unpack(entry));
    }
}

fn check(code: Result<Code<'_>>) {
    let Ok(code) = code else { return };
    _ = (code.output(), code.names_managed());
    if !code.is_machine() {
        let (end, text) = code.bytes().split_last().expect("text has an end");
        assert!(*end == 0 && !text.contains(&0));
        assert!(std::str::from_utf8(text).is_ok());
        return;
    }
    assert!(elf::is_whole(code.bytes()));
    let Ok(Some(managed)) = managed::Code::read(code.bytes().to_vec()) else {
        return;
    };
    let place = ManagedPlace {
        address: START,
        bytes: managed.bytes(),
    };
    let Ok(Some(placed)) = managed.place(place) else {
        return;
    };
    // The image keeps its length and is whole, and no value lies outside the place.
    assert_eq!(placed.code.bytes().len(), code.bytes().len());
    assert!(elf::is_whole(placed.code.bytes()));
    for (address, values) in placed.initial {
        let end = address.checked_add(values.len() as u64).expect("an end");
        assert!(address >= START && end <= START + place.bytes);
    }
}
