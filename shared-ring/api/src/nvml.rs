//! The functions of NVML, and what the backend asks the host's NVML for them.

/// An exported function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FunctionInfo {
    pub name: &'static str,
    pub class: Class,
}

/// How a function is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Answered by the guest's library.
    Answered,
    /// Answered with what the host's NVML says.
    Host,
    /// Returns `NVML_ERROR_NOT_SUPPORTED`, for this reason.
    Unsupported(&'static str),
    /// Returns `NVML_ERROR_NO_PERMISSION`, for this reason.
    Refused(&'static str),
}

/// An integer that a function fills.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Word {
    U32,
    U64,
}

impl Word {
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::U32 => 4,
            Self::U64 => 8,
        }
    }
}

/// A function of the host's NVML: `name(device, selectors…, outputs…)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostFunction {
    pub name: &'static str,
    /// What it says changes.
    pub live: bool,
    /// How many values each selector has, beginning with 0.
    pub selectors: &'static [u32],
    /// What each output is made of.
    pub outputs: &'static [&'static [Word]],
}

impl HostFunction {
    /// How many calls there are, one for each choice of selectors.
    #[must_use]
    pub fn calls(&self) -> u32 {
        self.selectors.iter().product()
    }

    /// The number of the call with these selectors; none if one of them is too large.
    #[must_use]
    pub fn call(&self, selectors: &[u32]) -> Option<u32> {
        let mut number = 0;
        for (selector, count) in selectors.iter().zip(self.selectors) {
            if selector >= count {
                return None;
            }
            number = number * count + selector;
        }
        Some(number)
    }

    /// The selector at `place` of the call with this number.
    #[must_use]
    pub fn selector(&self, call: u32, place: usize) -> u32 {
        let after: u32 = self.selectors.iter().skip(place + 1).product();
        let count = self.selectors.get(place).copied().unwrap_or(1);
        call / after % count
    }

    /// How many integers one call gives; one that gives none says only whether it succeeded.
    #[must_use]
    pub fn words(&self) -> usize {
        self.outputs.iter().map(|words| words.len()).sum()
    }
}

/// A field of `nvmlDeviceGetFieldValues`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    pub id: u32,
    pub name: &'static str,
    /// What it says changes.
    pub live: bool,
    /// How many links it is told of, beginning with 0, by which its scopes number them; none if it is the device's,
    /// whatever the scope.
    pub scopes: Option<u32>,
}

impl Field {
    /// The number of the answer for a scope; none if the field does not have it.
    #[must_use]
    pub fn call(&self, scope: u32) -> Option<u32> {
        match self.scopes {
            Some(scopes) => (scope < scopes).then_some(scope),
            None => Some(0),
        }
    }

    /// How many answers there are.
    #[must_use]
    pub fn calls(&self) -> u32 {
        self.scopes.unwrap_or(1)
    }
}

include!(concat!(env!("OUT_DIR"), "/nvml.rs"));

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_numbered_by_their_selectors() {
        for function in HOST {
            for call in 0..function.calls() {
                let selectors: [u32; 2] =
                    core::array::from_fn(|place| function.selector(call, place));
                let used = &selectors[..function.selectors.len()];
                assert_eq!(function.call(used), Some(call), "{}", function.name);
            }
            assert!(function.selectors.len() <= 2, "{}", function.name);
            let beyond: [u32; 2] = core::array::from_fn(|place| {
                function.selectors.get(place).copied().unwrap_or_default()
            });
            if !function.selectors.is_empty() {
                assert_eq!(function.call(&beyond[..function.selectors.len()]), None);
            }
        }
    }
}
