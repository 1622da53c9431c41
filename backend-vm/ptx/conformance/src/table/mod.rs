//! Instruction forms, by group.

mod approximate;
mod atomic;
mod compare;
mod convert;
mod float;
mod half;
mod integer;
mod matrix;
mod memory;
mod surface;
mod texture;
mod video;
mod warp;

use crate::form::{Form, Group};

/// Name of a group, and the function that lists its forms.
type Lister = (&'static str, fn() -> Vec<Form>);

const GROUPS: &[Lister] = &[
    ("integer", integer::arithmetic),
    ("bits", integer::bits),
    ("carry", integer::carry),
    ("setp", compare::predicates),
    ("set", compare::values),
    ("select", compare::selections),
    ("f32", float::singles),
    ("f64", float::doubles),
    ("approximate", approximate::forms),
    ("f16", half::halves),
    ("bf16", half::brains),
    ("cvt-integer", convert::integers),
    ("cvt-to-float", convert::to_floats),
    ("cvt-to-integer", convert::to_integers),
    ("cvt-float", convert::floats),
    ("warp", warp::forms),
    ("atomic", atomic::forms),
    ("memory", memory::forms),
    ("video", video::forms),
    ("mma", matrix::fragments),
    ("wmma", matrix::tiles),
    ("tex", texture::modes),
    ("tex-cube", texture::cubes),
    ("tex-format", texture::formats),
    ("tex-level", texture::levels),
    ("tld4", texture::gathers),
    ("txq", texture::queries),
    ("suld", surface::loads),
    ("sust", surface::stores),
    ("sured", surface::reductions),
];

/// Returns all groups.
#[must_use]
pub fn groups() -> Vec<Group> {
    GROUPS
        .iter()
        .map(|&(name, forms)| Group {
            name,
            forms: forms(),
        })
        .collect()
}

/// Returns the number of bits of a type: 32 for `u32`, and for `f16x2` as well.
fn bits(ty: &str) -> u32 {
    match ty {
        "f16x2" | "bf16x2" | "u16x2" | "s16x2" => 32,
        _ => ty
            .trim_start_matches(|c: char| !c.is_ascii_digit())
            .parse()
            .unwrap_or(32),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn no_two_forms_of_a_group_share_a_name() {
        for group in groups() {
            let mut names = HashSet::new();
            for form in &group.forms {
                assert!(names.insert(&form.name), "{}: {}", group.name, form.name);
            }
        }
    }
}
