//! The parameters of the C exports, typed.
//!
//! A program passes addresses, and keeps the contract of the C function: memory that is not null has the documented
//! length, is not written by others while the call reads it, and is writable where results go. All but lists are an
//! address in C as well, so that the functions that programs call have these types as parameters. The requirements of each
//! type on its memory are the program's part of the contract. Everything else is safe: the use of a null place is
//! `CUDA_ERROR_INVALID_VALUE`, and an index is compared with the length.
//!
//! None of these types is ever a reference. A program may pass one place for two results, a place of any alignment, and
//! memory that its other threads or a device write next.

use std::ffi::{CStr, c_char};
use std::fmt;
use std::marker::PhantomData;

use crate::error::{CuError, Result};

/// An input: one `T`, or a list of them. The place is null, or holds values that stay as they are for `'a`. So does what
/// the pointers in them lead to, as the C function documents it.
#[repr(transparent)]
pub struct In<'a, T: ?Sized>(*const T, PhantomData<&'a T>);

/// Place of a result, or of a list of them. It is null, or may be written for `'a`.
#[repr(transparent)]
pub struct Out<'a, T: ?Sized>(*mut T, PhantomData<&'a T>);

/// Place of a value that a function reads and then writes, as an [`In`] and as an [`Out`].
#[repr(transparent)]
pub struct InOut<'a, T: ?Sized>(*mut T, PhantomData<&'a T>);

/// Place of a list of results whose capacity is a number in the program's memory.
#[derive(Clone, Copy)]
pub struct Room<'a, T, N> {
    place: *mut T,
    count: InOut<'a, N>,
}

/// A string that stays as it is for `'a`, or null.
#[repr(transparent)]
pub struct Text<'a>(*const c_char, PhantomData<&'a CStr>);

/// Memory whose length and type only the function knows. It is null, or leads to what the C function documents, which
/// may be used so for `'a`.
#[repr(transparent)]
pub struct Pointer<'a, T>(*mut T, PhantomData<&'a T>);

/// An address that may be the program's own memory, which is then valid for what the C function does.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct UnifiedPtr<'a>(u64, PhantomData<&'a u8>);

macro_rules! places {
    ($($name:ident<'a $(, $parameter:ident $(: ?$sized:ident)?)*>;)*) => {$(
        impl<$($parameter $(: ?$sized)?),*> Clone for $name<'_, $($parameter),*> {
            fn clone(&self) -> Self {
                *self
            }
        }

        impl<$($parameter $(: ?$sized)?),*> Copy for $name<'_, $($parameter),*> {}

        impl<$($parameter $(: ?$sized)?),*> fmt::Debug for $name<'_, $($parameter),*> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl<$($parameter $(: ?$sized)?),*> $name<'_, $($parameter),*> {
            #[inline]
            pub fn is_null(self) -> bool {
                self.0.is_null()
            }

            /// Fails with `INVALID_VALUE` for a null place.
            #[inline]
            pub fn not_null(self) -> Result {
                checked(self.is_null())
            }
        }
    )*};
}

places! {
    In<'a, T: ?Sized>;
    Out<'a, T: ?Sized>;
    InOut<'a, T: ?Sized>;
    Text<'a>;
    Pointer<'a, T>;
}

/// The length of a list, as C functions pass it.
pub trait Length: Copy {
    fn length(self) -> usize;
}

impl Length for usize {
    #[inline]
    fn length(self) -> usize {
        self
    }
}

impl Length for u32 {
    #[inline]
    fn length(self) -> usize {
        self as usize
    }
}

/// A negative length counts as 0.
impl Length for i32 {
    #[inline]
    fn length(self) -> usize {
        usize::try_from(self).unwrap_or(0)
    }
}

fn checked(is_null: bool) -> Result {
    if is_null {
        Err(CuError::INVALID_VALUE)
    } else {
        Ok(())
    }
}

impl<'a, T: Copy> In<'a, T> {
    #[inline]
    pub fn get(self) -> Result<T> {
        self.not_null()?;
        // SAFETY: not null, so a value by the contract of the type; of any alignment.
        Ok(unsafe { self.0.read_unaligned() })
    }

    /// Returns the value, or nothing for a null place.
    #[inline]
    pub fn given(self) -> Option<T> {
        self.get().ok()
    }
}

impl<'a, T: Copy> In<'a, [T]> {
    /// # Safety
    /// `place` is null, or holds `count` elements as an [`In`] says.
    #[inline]
    pub const unsafe fn list(place: *const T, count: usize) -> Self {
        Self(std::ptr::slice_from_raw_parts(place, count), PhantomData)
    }

    /// Returns a null list.
    pub const fn none() -> Self {
        Self(
            std::ptr::slice_from_raw_parts(std::ptr::null(), 0),
            PhantomData,
        )
    }

    /// Returns an element, or `INVALID_VALUE` for an index behind the end.
    #[inline]
    pub fn get(self, index: usize) -> Result<T> {
        checked(self.is_null() || index >= self.0.len())?;
        // SAFETY: below the length; of any alignment.
        Ok(unsafe { self.0.cast::<T>().add(index).read_unaligned() })
    }

    /// Returns all elements, each read when the iterator comes to it. A null list must be empty.
    #[inline]
    pub fn values(self) -> Result<impl ExactSizeIterator<Item = T> + Clone + 'a>
    where
        T: 'a,
    {
        checked(self.is_null() && self.0.len() > 0)?;
        let first = self.0.cast::<T>();
        // SAFETY: below the length, and not null where there is one; of any alignment.
        Ok((0..self.0.len()).map(move |index| unsafe { first.add(index).read_unaligned() }))
    }

    pub fn to_vec(self) -> Result<Vec<T>>
    where
        T: 'a,
    {
        Ok(self.values()?.collect())
    }
}

impl In<'_, [u8]> {
    #[inline]
    pub fn address(self) -> u64 {
        self.0.expose_provenance() as u64
    }
}

impl<'a, T: Copy> Out<'a, T> {
    /// Returns a null place.
    pub const fn none() -> Self {
        Self(std::ptr::null_mut(), PhantomData)
    }

    /// Writes a result; a null place is `INVALID_VALUE`.
    #[inline]
    pub fn put(self, value: T) -> Result {
        self.not_null()?;
        self.put_if_wanted(value);
        Ok(())
    }

    /// Writes a result, unless the place is null.
    #[inline]
    pub fn put_if_wanted(self, value: T) {
        if !self.is_null() {
            // SAFETY: not null, so writable by the contract of the type; of any alignment.
            unsafe { self.0.write_unaligned(value) };
        }
    }

    /// Writes zeroes, unless the place is null.
    pub fn clear(self) {
        if !self.is_null() {
            // SAFETY: not null, so writable by the contract of the type; bytes have any alignment.
            unsafe { self.0.cast::<u8>().write_bytes(0, size_of::<T>()) };
        }
    }
}

impl<'a, T: Copy> Out<'a, [T]> {
    /// # Safety
    /// `place` is null, or has room for `count` elements for `'a`.
    #[inline]
    pub const unsafe fn list(place: *mut T, count: usize) -> Self {
        Self(
            std::ptr::slice_from_raw_parts_mut(place, count),
            PhantomData,
        )
    }

    /// Returns the number of elements that fit.
    pub fn len(self) -> usize {
        self.0.len()
    }

    /// Writes an element; `INVALID_VALUE` if it does not fit.
    pub fn put(self, index: usize, value: T) -> Result {
        checked(self.is_null() || index >= self.len())?;
        // SAFETY: below the length; of any alignment.
        unsafe { self.0.cast::<T>().add(index).write_unaligned(value) };
        Ok(())
    }

    /// Writes the first elements.
    pub fn put_all(self, values: impl IntoIterator<Item = T>) -> Result {
        let mut numbered = values.into_iter().enumerate();
        numbered.try_for_each(|(index, value)| self.put(index, value))
    }
}

impl Out<'_, [u8]> {
    #[inline]
    pub fn address(self) -> u64 {
        self.0.expose_provenance() as u64
    }
}

impl<'a, T: Copy> InOut<'a, T> {
    /// # Safety
    /// `place` is as an [`InOut`] says.
    #[inline]
    pub const unsafe fn new(place: *mut T) -> Self {
        Self(place, PhantomData)
    }

    #[inline]
    pub fn get(self) -> Result<T> {
        In(self.0.cast_const(), PhantomData).get()
    }

    #[inline]
    pub fn put(self, value: T) -> Result {
        Out(self.0, self.1).put(value)
    }

    #[inline]
    pub fn put_if_wanted(self, value: T) {
        Out(self.0, self.1).put_if_wanted(value);
    }
}

impl<'a, T: Copy> InOut<'a, [T]> {
    /// # Safety
    /// As for [`In::list`] and for [`Out::list`].
    #[inline]
    pub const unsafe fn list(place: *mut T, count: usize) -> Self {
        Self(
            std::ptr::slice_from_raw_parts_mut(place, count),
            PhantomData,
        )
    }

    /// Returns an element, or `INVALID_VALUE` for an index behind the end.
    pub fn get(self, index: usize) -> Result<T> {
        In(self.0.cast_const(), PhantomData).get(index)
    }

    /// Returns the address of an element.
    pub fn place(self, index: usize) -> Result<*mut T> {
        checked(self.is_null() || index >= self.0.len())?;
        Ok(self.0.cast::<T>().wrapping_add(index))
    }
}

impl<'a, T: Copy, N: Length> Room<'a, T, N> {
    /// # Safety
    /// `place` is null, or has room for as many elements as `count` says when the function reads it.
    #[inline]
    pub const unsafe fn new(place: *mut T, count: InOut<'a, N>) -> Self {
        Self { place, count }
    }

    /// Returns a null list.
    pub const fn none(count: InOut<'a, N>) -> Self {
        let place = std::ptr::null_mut();
        Self { place, count }
    }

    #[inline]
    pub fn is_null(self) -> bool {
        self.place.is_null()
    }

    /// Returns the list with its present capacity.
    pub fn list(self) -> Result<Out<'a, [T]>> {
        let count = self.count.get()?.length();
        // SAFETY: by the contract of `new` there is room for as many.
        Ok(unsafe { Out::list(self.place, count) })
    }
}

impl<T, N> fmt::Debug for Room<'_, T, N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.place.fmt(f)
    }
}

impl<'a> Text<'a> {
    pub fn get(self) -> Result<&'a CStr> {
        self.not_null()?;
        // SAFETY: not null, so a string by the contract of the type.
        Ok(unsafe { CStr::from_ptr(self.0) })
    }
}

impl<'a, T> Pointer<'a, T> {
    /// # Safety
    /// `place` is as a [`Pointer`] says.
    #[inline]
    pub const unsafe fn new(place: *mut T) -> Self {
        Self(place, PhantomData)
    }

    pub const fn null() -> Self {
        Self(std::ptr::null_mut(), PhantomData)
    }

    #[inline]
    pub fn as_ptr(self) -> *mut T {
        self.0
    }

    /// Returns the elements there, for reading.
    ///
    /// # Safety
    /// The C function documents that many elements.
    pub unsafe fn read(self, count: usize) -> In<'a, [T]>
    where
        T: Copy,
    {
        // SAFETY: as documented, which the program keeps by the contract of the type.
        unsafe { In::list(self.0, count) }
    }

    /// Returns the bytes there, for reading.
    ///
    /// # Safety
    /// The C function documents that many.
    pub unsafe fn bytes(self, count: usize) -> In<'a, [u8]> {
        // SAFETY: as documented, which the program keeps by the contract of the type.
        unsafe { In::list(self.0.cast(), count) }
    }

    /// Returns the value there, for reading and writing.
    ///
    /// # Safety
    /// The C function documents one `U`, initialised where it is read.
    pub unsafe fn of<U: Copy>(self) -> InOut<'a, U> {
        // SAFETY: as documented, which the program keeps by the contract of the type.
        unsafe { InOut::new(self.0.cast()) }
    }

    /// Returns the bytes there, for writing.
    ///
    /// # Safety
    /// The C function documents room for that many.
    pub unsafe fn room(self, bytes: usize) -> Out<'a, [u8]> {
        // SAFETY: as documented, which the program keeps by the contract of the type.
        unsafe { Out::list(self.0.cast(), bytes) }
    }
}

impl fmt::Debug for UnifiedPtr<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl UnifiedPtr<'_> {
    #[inline]
    pub const fn address(self) -> u64 {
        self.0
    }
}

/// Parameters of the library's own tests.
#[cfg(test)]
mod of_references {
    use super::*;

    impl<'a, T> From<&'a mut T> for Out<'a, T> {
        fn from(place: &'a mut T) -> Self {
            Self(place, PhantomData)
        }
    }

    impl<'a, T> From<&'a mut T> for InOut<'a, T> {
        fn from(place: &'a mut T) -> Self {
            Self(place, PhantomData)
        }
    }

    impl<'a> From<&'a CStr> for Text<'a> {
        fn from(text: &'a CStr) -> Self {
            Self(text.as_ptr(), PhantomData)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NULL: Result = Err(CuError::INVALID_VALUE);

    #[test]
    fn a_place_that_is_null_is_an_invalid_value_where_it_is_needed() {
        let input = In::<u32>(std::ptr::null(), PhantomData);
        let both = InOut::<u32>(std::ptr::null_mut(), PhantomData);
        let text = Text(std::ptr::null(), PhantomData);
        assert_eq!(input.get().map(drop), NULL);
        assert_eq!((both.get().map(drop), both.put(1)), (NULL, NULL));
        assert_eq!(text.get().map(drop), NULL);
        let output = Out::<u32>::none();
        output.put_if_wanted(1);
        assert_eq!(output.put(1), NULL);
    }

    #[test]
    fn results_may_share_a_place_of_any_alignment() {
        let mut bytes = [0_u8; 9];
        let place = bytes[1..].as_mut_ptr();
        let long = Out::<u64>(place.cast(), PhantomData);
        let word = Out::<u32>(place.cast(), PhantomData);
        let both = InOut::<u64>(place.cast(), PhantomData);
        long.put(u64::MAX).unwrap();
        word.put(7).unwrap();
        assert_eq!(both.get(), Ok(0xFFFF_FFFF_0000_0007));
        assert_eq!(bytes[0], 0);
        long.clear();
        Out::<u64>::none().clear();
        assert_eq!(bytes, [0; 9]);
    }

    #[test]
    fn a_list_ends_at_its_length() {
        let given = [1_u16, 2, 3];
        let mut taken = [9_u16; 3];
        // SAFETY: both are longer.
        let (input, output) = unsafe {
            (
                In::list(given.as_ptr(), 2),
                Out::list(taken.as_mut_ptr(), 2),
            )
        };
        assert_eq!(input.to_vec(), Ok(vec![1, 2]));
        assert_eq!((input.get(1), input.get(2).map(drop)), (Ok(2), NULL));
        assert_eq!(output.put_all(given), NULL);
        assert_eq!(taken, [1, 2, 9]);
    }

    #[test]
    fn a_list_that_is_null_may_only_be_empty() {
        // SAFETY: null.
        let list = |count| unsafe { In::<[u32]>::list(std::ptr::null(), count) };
        assert_eq!(list(0).to_vec(), Ok(Vec::new()));
        assert_eq!(list(1).to_vec().map(drop), NULL);
        assert_eq!(list(1).get(0).map(drop), NULL);
    }

    #[test]
    fn room_is_as_long_as_its_number_says_when_it_is_used() {
        let (mut place, mut count) = ([0_u8; 4], 4_u32);
        let count = &raw mut count;
        // SAFETY: the place has four elements, and the number says no more.
        let room = unsafe { Room::new(place.as_mut_ptr(), InOut::new(count)) };
        // SAFETY: no other code uses the number meanwhile.
        unsafe { count.write(2) };
        assert_eq!(room.list().map(Out::len), Ok(2));
        let without: Room<'_, u8, u32> = Room::none(InOut(std::ptr::null_mut(), PhantomData));
        assert_eq!(without.list().map(drop), NULL);
    }

    #[test]
    fn a_length_below_zero_is_none() {
        assert_eq!((3_i32.length(), (-1_i32).length()), (3, 0));
    }
}
