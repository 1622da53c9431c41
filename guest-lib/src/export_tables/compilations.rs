//! Cache of compiled code: NVRTC looks a result up before it compiles, and stores the result after.

use std::ffi::c_void;
use std::ptr;

use crate::calls::code;
use crate::error::{CuError, Result};
use crate::log;
use crate::object::compiled_code::{Question, Store};
use crate::parameter::{Out, Pointer, Text};
use crate::types::CUresult;

/// Returns bytes that the compiler passes by their address and their length.
fn bytes(place: Pointer<'_, u8>, length: usize) -> Result<Vec<u8>> {
    place.not_null()?;
    // SAFETY: in every function of this table the parameter behind an address is its length.
    unsafe { place.read(length) }.to_vec()
}

/// Makes a question about compiled code, from the kind of result, the source and all options of the compiler. The
/// number after the architecture is always 1 and may be no argument at all: as a part of the question it does no harm.
pub extern "C" fn ask_compilation(
    place: Out<'_, *mut Question>,
    kind: u32,
    source: Pointer<'_, u8>,
    length: usize,
    options: Text<'_>,
    host: Text<'_>,
    build: Text<'_>,
    architecture: u32,
    number: u32,
) -> CUresult {
    let question = || {
        place.not_null()?;
        let source = bytes(source, length)?;
        let words = [options, host, build].map(|word| word.get().unwrap_or(c""));
        let question = Question::new(&[kind, architecture, number], &source, &words);
        place.put(Box::into_raw(Box::new(question)))
    };
    code(question())
}

pub extern "C" fn forget_question(_: Option<Box<Question>>) -> CUresult {
    0
}

/// Returns a result in memory that `free_compilation` frees.
pub extern "C" fn find_compilation(
    question: Option<&Question>,
    _: usize,
    place: Out<'_, *mut c_void>,
    length: Out<'_, u32>,
) -> CUresult {
    let Some(question) = question else {
        return CuError::INVALID_VALUE.0;
    };
    let found = || Store::of_the_environment()?.find(question);
    let Some(result) = found() else {
        return CuError::NOT_FOUND.0;
    };
    code(give(&result, place, length))
}

/// Copies a result to memory that `free_compilation` frees.
fn give(result: &[u8], place: Out<'_, *mut c_void>, length: Out<'_, u32>) -> Result {
    if place.is_null() || length.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    let bytes = u32::try_from(result.len()).map_err(|_| CuError::NOT_FOUND)?;
    // SAFETY: `malloc` accepts any size.
    let memory = unsafe { libc::malloc(result.len().max(1)) };
    if memory.is_null() {
        return Err(CuError::NOT_FOUND);
    }
    // SAFETY: the new memory is as long as the result.
    unsafe { ptr::copy_nonoverlapping(result.as_ptr(), memory.cast(), result.len()) };
    length.put(bytes)?;
    place.put(memory)
}

pub extern "C" fn keep_compilation(
    question: Option<&Question>,
    _: usize,
    result: Pointer<'_, u8>,
    length: u32,
) -> CUresult {
    let keep = || {
        let question = question.ok_or(CuError::INVALID_VALUE)?;
        let result = bytes(result, length as usize)?;
        if let Some(store) = Store::of_the_environment()
            && let Err(error) = store.insert(question, &result)
        {
            // The compiler has its result, and compiles again the next time.
            log::debug!("compiled code is not kept: {error}");
        }
        Ok(())
    };
    code(keep())
}

/// # Safety
/// `memory` is a result of `find_compilation` that was not freed, or null.
pub unsafe extern "C" fn free_compilation(memory: *mut c_void) -> CUresult {
    // SAFETY: `find_compilation` allocated it by `malloc`, and this call is the only one that frees it.
    unsafe { libc::free(memory) };
    0
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use super::*;

    #[test]
    fn a_compiler_finds_what_it_has_handed_in() {
        let folder = std::env::temp_dir().join(format!("compilers-{}", std::process::id()));
        // SAFETY: no other test of this crate reads these variables, and no other code writes any.
        unsafe {
            std::env::set_var("CUDA_CACHE_PATH", &folder);
            std::env::remove_var("CUDA_CACHE_DISABLE");
        }
        let pointer = |bytes: &'static [u8]| {
            // SAFETY: the bytes are static.
            (
                unsafe { Pointer::new(bytes.as_ptr().cast_mut()) },
                bytes.len(),
            )
        };
        let ask = |options: &CStr| {
            let mut question = ptr::null_mut();
            let (place, (source, length)) = (Out::from(&mut question), pointer(b"source"));
            let words = [options, c"HOST64", c""].map(Text::from);
            let [options, host, build] = words;
            let asked = ask_compilation(place, 1, source, length, options, host, build, 90, 1);
            assert_eq!(asked, 0);
            // SAFETY: the function made the question by `Box::into_raw`.
            unsafe { Box::from_raw(question) }
        };
        let find = |question: &Question| {
            let (mut memory, mut length) = (ptr::null_mut(), 0);
            let places = (Out::from(&mut memory), Out::from(&mut length));
            let code = find_compilation(Some(question), 0, places.0, places.1);
            // SAFETY: a result has that many bytes, and is freed once.
            unsafe {
                let found = (code == 0)
                    .then(|| std::slice::from_raw_parts(memory.cast::<u8>(), length as usize));
                let found = found.map(<[u8]>::to_vec);
                assert_eq!(free_compilation(memory), 0);
                found.ok_or(code)
            }
        };
        let (question, other) = (ask(c"-O3"), ask(c"-O2"));
        assert_eq!(find(&question), Err(CuError::NOT_FOUND.0));
        let (result, length) = pointer(b"the result");
        let bytes = u32::try_from(length).unwrap();
        assert_eq!(keep_compilation(Some(&question), 0, result, bytes), 0);
        assert_eq!(find(&question).as_deref(), Ok(&b"the result"[..]));
        assert_eq!(find(&other), Err(CuError::NOT_FOUND.0));
        let refused = find_compilation(Some(&question), 0, Out::none(), Out::none());
        assert_eq!(refused, CuError::INVALID_VALUE.0);
        // SAFETY: as above.
        unsafe { std::env::set_var("CUDA_CACHE_DISABLE", "1") };
        assert_eq!(find(&question), Err(CuError::NOT_FOUND.0));
        for question in [question, other] {
            assert_eq!(forget_question(Some(question)), 0);
        }
        let _ = std::fs::remove_dir_all(folder);
    }
}
