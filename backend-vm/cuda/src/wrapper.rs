//! Images of relocatable links, as the driver takes them.

use std::ffi::c_void;
use std::ptr;

/// `__fatBinC_Wrapper_t`, version 2: the linked fat binary, and those that it was linked of.
#[repr(C)]
#[derive(Debug)]
struct Header {
    magic: u32,
    version: u32,
    linked: *const c_void,
    inputs: *const *const c_void,
}

const MAGIC: u32 = 0x4662_43b1;
const VERSION: u32 = 2;

/// A wrapper for fat binaries, which must outlive it.
#[derive(Debug)]
pub struct Wrapper {
    header: Box<Header>,
    /// Ends with null.
    _inputs: Vec<*const c_void>,
}

impl Wrapper {
    /// None unless there is more than one fat binary.
    pub fn of(image: &[u8]) -> Option<Self> {
        let fatbins = wormhole_fatbin::fatbins(image).ok()?;
        let (linked, inputs) = fatbins.split_first()?;
        if inputs.is_empty() {
            return None;
        }
        let start = |fatbin: &&[u8]| fatbin.as_ptr().cast::<c_void>();
        let inputs: Vec<_> = inputs.iter().map(start).chain([ptr::null()]).collect();
        let header = Box::new(Header {
            magic: MAGIC,
            version: VERSION,
            linked: start(linked),
            inputs: inputs.as_ptr(),
        });
        Some(Self {
            header,
            _inputs: inputs,
        })
    }

    pub fn as_ptr(&self) -> *const c_void {
        ptr::from_ref(&*self.header).cast()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_fat_binary_is_the_linked_one() {
        let fatbin = b"\x50\xed\x55\xba\x01\0\x10\0\0\0\0\0\0\0\0\0";
        assert!(Wrapper::of(fatbin).is_none());
        let image = [*fatbin, *fatbin, *fatbin].concat();
        let wrapper = Wrapper::of(&image).unwrap();
        assert_eq!(wrapper.header.linked, image.as_ptr().cast());
        assert_eq!(wrapper.header.inputs, wrapper._inputs.as_ptr());
        let starts: Vec<usize> = wrapper._inputs.iter().map(|input| input.addr()).collect();
        let first = image.as_ptr().addr();
        assert_eq!(starts, [first + 16, first + 32, 0]);
    }
}
