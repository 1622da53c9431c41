//! Cache of compiled code: NVRTC looks a result up before it compiles, and stores the result after.

use std::ffi::{CStr, c_char, c_void};
use std::ptr;

use super::{code, put};
use crate::error::CuError;
use crate::log;
use crate::object::compiled_code::{Question, Store};
use crate::types::CUresult;

/// Makes a question about compiled code, from the kind of result, the source and all options of the compiler. The
/// number after the architecture is always 1 and may be no argument at all: as a part of the question it does no harm.
pub unsafe extern "C" fn ask_compilation(
    place: *mut *mut Question,
    kind: u32,
    source: *const u8,
    bytes: usize,
    options: *const c_char,
    host: *const c_char,
    build: *const c_char,
    architecture: u32,
    number: u32,
) -> CUresult {
    if place.is_null() || source.is_null() {
        return CuError::INVALID_VALUE.0;
    }
    // SAFETY: the caller's source has that many bytes.
    let source = unsafe { std::slice::from_raw_parts(source, bytes) };
    let words = [options, host, build].map(|word| {
        if word.is_null() {
            c""
        } else {
            // SAFETY: not null, so a string of the caller's.
            unsafe { CStr::from_ptr(word) }
        }
    });
    let question = Question::new(&[kind, architecture, number], source, &words);
    // SAFETY: not null, so writable.
    unsafe { place.write(Box::into_raw(Box::new(question))) };
    0
}

pub unsafe extern "C" fn forget_question(question: *mut Question) -> CUresult {
    if !question.is_null() {
        // SAFETY: a question of `ask_compilation`, which the caller frees once.
        drop(unsafe { Box::from_raw(question) });
    }
    0
}

/// Returns a result in memory that `free_compilation` frees.
pub unsafe extern "C" fn find_compilation(
    question: *const Question,
    _: usize,
    place: *mut *mut c_void,
    length: *mut u32,
) -> CUresult {
    // SAFETY: a question of `ask_compilation`, or null.
    let Some(question) = (unsafe { question.as_ref() }) else {
        return CuError::INVALID_VALUE.0;
    };
    let found = || {
        let result = Store::of_the_environment()?.find(question)?;
        let bytes = u32::try_from(result.len()).ok()?;
        // SAFETY: a size of at least one byte; the copy fits.
        unsafe {
            let memory = libc::malloc(result.len().max(1));
            if memory.is_null() {
                return None;
            }
            ptr::copy_nonoverlapping(result.as_ptr(), memory.cast(), result.len());
            Some((memory, bytes))
        }
    };
    let Some((memory, bytes)) = found() else {
        return CuError::NOT_FOUND.0;
    };
    // SAFETY: both are null or writable.
    let put = unsafe { put(place, memory).and_then(|()| put(length, bytes)) };
    if put.is_err() {
        // SAFETY: allocated above.
        unsafe { libc::free(memory) };
    }
    code(put)
}

pub unsafe extern "C" fn keep_compilation(
    question: *const Question,
    _: usize,
    result: *const u8,
    bytes: u32,
) -> CUresult {
    // SAFETY: a question of `ask_compilation`, or null.
    let Some(question) = (unsafe { question.as_ref() }) else {
        return CuError::INVALID_VALUE.0;
    };
    if result.is_null() {
        return CuError::INVALID_VALUE.0;
    }
    // SAFETY: the caller's result has that many bytes.
    let result = unsafe { std::slice::from_raw_parts(result, bytes as usize) };
    if let Some(store) = Store::of_the_environment()
        && let Err(error) = store.keep(question, result)
    {
        // The compiler has its result, and compiles again the next time.
        log::debug!("compiled code is not kept: {error}");
    }
    0
}

pub unsafe extern "C" fn free_compilation(memory: *mut c_void) -> CUresult {
    // SAFETY: memory of `find_compilation`, which the caller frees once.
    unsafe { libc::free(memory) };
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_compiler_finds_what_it_has_handed_in() {
        let folder = std::env::temp_dir().join(format!("compilers-{}", std::process::id()));
        // SAFETY: no other test of this crate reads these variables, and no other code writes any.
        unsafe {
            std::env::set_var("CUDA_CACHE_PATH", &folder);
            std::env::remove_var("CUDA_CACHE_DISABLE");
        }
        let source = *b"source";
        let result = *b"the result";
        // SAFETY: all places belong to this test, and every question and result is freed once.
        unsafe {
            let ask = |options: &CStr| {
                let mut question = ptr::null_mut();
                let (options, host, build) = (options.as_ptr(), c"HOST64".as_ptr(), ptr::null());
                let (start, bytes) = (source.as_ptr(), source.len());
                let asked = ask_compilation(
                    &raw mut question,
                    1,
                    start,
                    bytes,
                    options,
                    host,
                    build,
                    90,
                    1,
                );
                assert_eq!(asked, 0);
                question
            };
            let find = |question| {
                let (mut memory, mut bytes) = (ptr::null_mut(), 0);
                let code = find_compilation(question, 0, &raw mut memory, &raw mut bytes);
                let found = (code == 0)
                    .then(|| std::slice::from_raw_parts(memory.cast::<u8>(), bytes as usize));
                let found = found.map(<[u8]>::to_vec);
                assert_eq!(free_compilation(memory), 0);
                found.ok_or(code)
            };
            let (question, other) = (ask(c"-O3"), ask(c"-O2"));
            assert_eq!(find(question), Err(CuError::NOT_FOUND.0));
            let bytes = u32::try_from(result.len()).unwrap();
            assert_eq!(keep_compilation(question, 0, result.as_ptr(), bytes), 0);
            assert_eq!(find(question).as_deref(), Ok(&result[..]));
            assert_eq!(find(other), Err(CuError::NOT_FOUND.0));
            std::env::set_var("CUDA_CACHE_DISABLE", "1");
            assert_eq!(find(question), Err(CuError::NOT_FOUND.0));
            for question in [question, other] {
                assert_eq!(forget_question(question), 0);
            }
        }
        let _ = std::fs::remove_dir_all(folder);
    }
}
