//! Compares one device's results with the recorded answers.

use crate::answers::{Answer, digest};
use crate::form::{Approximation, Check, Form, Format};
use crate::operands::{Class, rows};

/// Row of a form whose results differ from the recorded ones beyond the permitted bound.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    pub row: usize,
    pub operands: Vec<u64>,
    pub kept: Vec<u64>,
    pub found: Vec<u64>,
}

/// Outcome of the comparison of one form.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Number of rows that are equal, number within their bound, and all others.
    Compared {
        exact: usize,
        within: usize,
        differing: Vec<Difference>,
    },
    /// Neither device runs the form: the recording device refused it, or both failed in the same way.
    Refused,
    /// No answer is recorded for the form as it is now.
    NoAnswer,
    /// Only one device has results.
    OneSided { kept: String, found: String },
}

/// Compares the results of a form with the recorded answer.
#[must_use]
pub fn compare(form: &Form, kept: Option<&Answer>, found: &Answer) -> Outcome {
    let Some(kept) = kept.filter(|kept| kept.digest == digest(form)) else {
        return Outcome::NoAnswer;
    };
    let (kept, found) = match (&kept.results, &found.results) {
        (Ok(kept), Ok(found)) if kept.len() == form.rows && found.len() == form.rows => {
            (kept, found)
        }
        (Err(kept), Err(found)) if kept == found || !kept.starts_with("faulted") => {
            return Outcome::Refused;
        }
        (kept, found) => {
            let say = |results: &Result<Vec<Vec<u64>>, String>| match results {
                Ok(rows) => format!("{} rows", rows.len()),
                Err(reason) => reason.clone(),
            };
            return Outcome::OneSided {
                kept: say(kept),
                found: say(found),
            };
        }
    };
    let (mut exact, mut within, mut differing) = (0, 0, Vec::new());
    let operands = rows(form);
    for (row, operands) in operands.into_iter().enumerate() {
        let (kept, found) = (&kept[row], &found[row]);
        if kept == found {
            exact += 1;
        } else if allowed(form, &operands, kept, found) {
            within += 1;
        } else {
            differing.push(Difference {
                row,
                operands,
                kept: kept.clone(),
                found: found.clone(),
            });
        }
    }
    Outcome::Compared {
        exact,
        within,
        differing,
    }
}

/// Returns whether results that differ from the recorded ones are within the form's bound.
fn allowed(form: &Form, operands: &[u64], kept: &[u64], found: &[u64]) -> bool {
    if kept.len() != found.len() {
        return false;
    }
    let format = match form.check {
        Check::Exact => return false,
        Check::Approximate(approximation) => approximation.format,
        Check::Near(format, _) => format,
    };
    kept.iter()
        .zip(found)
        .enumerate()
        .all(|(column, (&kept, &found))| {
            // A register may hold two halves.
            let parts = form.outputs[column] / format.bits();
            (0..parts).all(|part| {
                let cut =
                    |word: u64| word >> (part * format.bits()) & (u64::MAX >> (64 - format.bits()));
                let (kept, found) = (cut(kept), cut(found));
                kept == found
                    || match &form.check {
                        Check::Exact => false,
                        Check::Near(_, distance) => {
                            (format.value(kept) - format.value(found)).abs() <= *distance
                        }
                        Check::Approximate(approximation) => {
                            let operands: Vec<u64> = form
                                .inputs
                                .iter()
                                .zip(operands)
                                .map(|(class, &word)| match class {
                                    Class::Pair(_) => cut(word),
                                    _ => word,
                                })
                                .collect();
                            approximates(approximation, &operands, [kept, found])
                        }
                    }
            })
        })
}

/// Returns whether both results lie within the bound.
fn approximates(approximation: &Approximation, operands: &[u64], results: [u64; 2]) -> bool {
    let format = approximation.format;
    let operands: Vec<f64> = operands
        .iter()
        .map(|&operand| {
            let value = format.value(operand);
            if approximation.flush && format.is_subnormal(operand) {
                0.0_f64.copysign(value)
            } else {
                value
            }
        })
        .collect();
    let exact = (approximation.exact)(&operands);
    let results = results.map(|result| format.value(result));
    if results.iter().any(|result| !result.is_finite()) || results == [0.0, 0.0] {
        return false;
    }
    let normal = smallest_normal(format);
    // Near the threshold of flushing, a flushed and an unflushed result are both correct.
    let flushed = if approximation.flush && exact.abs() <= normal {
        normal
    } else {
        0.0
    };
    let error = (approximation.error)(&operands, exact) + rounding(format, exact) + flushed;
    results.iter().all(|result| (result - exact).abs() <= error)
}

fn smallest_normal(format: Format) -> f64 {
    format.value(1 << format.fraction())
}

/// Returns half the distance of two neighbours in a 16-bit format, whose bounds apply before the result
/// is rounded.
fn rounding(format: Format, exact: f64) -> f64 {
    if !matches!(format, Format::F16 | Format::Bf16) {
        return 0.0;
    }
    let scale = exact.abs().max(smallest_normal(format)).log2().floor();
    let half = -1.0 - f64::from(format.fraction());
    (scale + half).exp2()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(form: &Form, value: u64) -> Answer {
        Answer::new(form, Ok(vec![vec![value]; form.rows]))
    }

    #[test]
    fn one_bit_is_a_difference_where_results_are_exact() {
        let form = Form::plain("add.u32", &[Class::Int(32); 2], 32);
        let mut kept = answer(&form, 1);
        if let Ok(rows) = &mut kept.results {
            rows[5][0] = 3;
        }
        let outcome = compare(&form, Some(&kept), &answer(&form, 1));
        let Outcome::Compared {
            exact,
            within,
            differing,
        } = outcome
        else {
            panic!("{outcome:?}");
        };
        assert_eq!((exact, within), (form.rows - 1, 0));
        assert_eq!((differing[0].row, differing.len()), (5, 1));
    }

    #[test]
    fn answers_of_another_kernel_count_as_none() {
        let form = Form::plain("add.u32", &[Class::Int(32); 2], 32);
        let other = Form::plain("sub.u32", &[Class::Int(32); 2], 32);
        let outcome = compare(&form, Some(&answer(&other, 0)), &answer(&form, 0));
        assert_eq!(outcome, Outcome::NoAnswer);
        assert_eq!(compare(&form, None, &answer(&form, 0)), Outcome::NoAnswer);
    }

    #[test]
    fn an_approximation_passes_inside_its_bound_only() {
        let root = Approximation {
            format: Format::F32,
            flush: false,
            exact: |x| x[0].sqrt(),
            error: |_, exact| exact * (-23.0_f64).exp2(),
        };
        let results = |found: f32| [2.0_f32, found].map(|result| u64::from(result.to_bits()));
        let four = [u64::from(4.0_f32.to_bits())];
        assert!(approximates(&root, &four, results(2.0_f32.next_up())));
        assert!(!approximates(
            &root,
            &four,
            results(2.0_f32.next_up().next_up())
        ));
        assert!(!approximates(&root, &four, results(f32::INFINITY)));
        assert!(!approximates(&root, &four, results(f32::NAN)));
    }
}
