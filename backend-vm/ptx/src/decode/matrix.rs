//! Lowers products of matrices that are distributed over the lanes of a warp (PTX ISA 9.7.14).

use std::sync::Arc;

use super::fragment::{FragmentKind, Layout, Role, Shape};
use super::function::Lowering;
use super::insn::{
    AddressSpace, BitProduct, Collective, CollectiveArgs, Element, Fragment, Matrix, Multiply, Op,
    Place, Reg, TRUE, Tiles,
};
use super::modifiers::Modifiers;
use super::{Reject, malformed};
use crate::alu::LANES;
use crate::alu::half::Rounding;
use crate::limits::MAX_MATRIX_ELEMENTS;
use crate::parse::ast::{Operand, Type};

/// Decoded modifiers of a matrix instruction.
#[derive(Debug, Default)]
struct Words {
    shape: Option<Shape>,
    elements: Vec<Element>,
    /// Whether each matrix is row-major, in the order of the opcode.
    rows: Vec<bool>,
    saturate: bool,
    bits: Option<BitProduct>,
    rounding: Option<Rounding>,
}

impl Words {
    fn take(m: &mut Modifiers<'_>) -> Result<Self, Reject> {
        let mut words = Self {
            rounding: m.rounding(),
            ..Self::default()
        };
        while let Some(word) = m.first() {
            if let Some(element) = Element::named(word) {
                words.elements.push(element);
            } else if let Some(shape) = Shape::named(word) {
                words.shape = Some(shape);
            } else {
                match word {
                    "sync" | "aligned" | "popc" => {}
                    "row" => words.rows.push(true),
                    "col" => words.rows.push(false),
                    "satfinite" => words.saturate = true,
                    "xor" => words.bits = Some(BitProduct::Xor),
                    "and" => words.bits = Some(BitProduct::And),
                    _ => return Err(Reject::Unsupported),
                }
            }
        }
        Ok(words)
    }
}

impl<'a> Lowering<'a, '_, '_> {
    /// Lowers the instruction if it is one of this module's.
    pub(crate) fn matrix(
        &mut self,
        name: &str,
        m: &mut Modifiers<'a>,
        operands: &[Operand<'a>],
    ) -> Result<bool, Reject> {
        let matrix = match name {
            "mma" => self.mma(m, operands)?,
            "wmma" if m.take("mma") => self.wmma_product(m, operands)?,
            "wmma" if m.take("load") => self.wmma_load(m, operands)?,
            "wmma" if m.take("store") => self.wmma_store(m, operands)?,
            "ldmatrix" => self.tiles(true, m, operands)?,
            "stmatrix" => self.tiles(false, m, operands)?,
            "movmatrix" => {
                if !(m.take("m8n8") && m.take("trans") && m.ty()? == Type::B16) {
                    return Err(Reject::Unsupported);
                }
                m.ignore(|part| matches!(part, "sync" | "aligned"));
                let [d, a] = operands else {
                    return malformed("its operands are not two registers");
                };
                let a = self.source(a, Type::B32)?;
                let d = self.dest(d)?;
                Matrix::Transpose { d, a }
            }
            _ => return Ok(false),
        };
        self.join()?;
        self.emit(Op::Matrix(Box::new(matrix)));
        Ok(true)
    }

    /// Emits a barrier of the whole warp: `.aligned` promises that all lanes arrive.
    fn join(&mut self) -> Result<(), Reject> {
        let members = self.constant(u64::from(u32::MAX))?;
        self.emit(Op::Collective(Box::new(CollectiveArgs {
            kind: Collective::WarpBarrier,
            dest: None,
            dest_pred: None,
            a: members,
            b: members,
            c: members,
            source: TRUE,
            members,
        })));
        Ok(())
    }

    fn mma(&mut self, m: &mut Modifiers<'a>, operands: &[Operand<'a>]) -> Result<Matrix, Reject> {
        let words = Words::take(m)?;
        let shape = words.shape.ok_or(Reject::Unsupported)?;
        let &[d, a, b, c] = &words.elements[..] else {
            return Err(Reject::Unsupported);
        };
        let &[a_rows, b_rows] = &words.rows[..] else {
            return Err(Reject::Unsupported);
        };
        let quads = a == Element::F16 && (shape.m, shape.n, shape.k) == (8, 8, 4);
        let layout = if quads {
            Layout::Quads(a_rows, b_rows)
        } else {
            // The hardware has at most four steps along `k`.
            let steps = shape.units(a).k / (4 * a.packed());
            let whole = shape.units(a).k % (4 * a.packed()) == 0 && (1..=4).contains(&steps);
            if !(a_rows && !b_rows && matches!(shape.m, 8 | 16) && shape.n == 8 && whole) {
                return Err(Reject::Unsupported);
            }
            Layout::Mma
        };
        self.multiply(&words, shape, [d, a, b, c], layout, operands)
    }

    fn wmma_product(
        &mut self,
        m: &mut Modifiers<'a>,
        operands: &[Operand<'a>],
    ) -> Result<Matrix, Reject> {
        let words = Words::take(m)?;
        let shape = words.shape.ok_or(Reject::Unsupported)?;
        let types = match words.elements[..] {
            [d, a, b, c] => [d, a, b, c],
            // A product of halves names only the types of its sums.
            [d, c] => [d, Element::F16, Element::F16, c],
            _ => return Err(Reject::Unsupported),
        };
        self.multiply(&words, shape, types, Layout::Wmma, operands)
    }

    fn multiply(
        &mut self,
        words: &Words,
        shape: Shape,
        [d, a, b, c]: [Element; 4],
        layout: Layout,
        operands: &[Operand<'a>],
    ) -> Result<Matrix, Reject> {
        let supported = a.sums_to(d) && a.sums_to(c) && a.multiplies(b);
        if !supported || words.bits.is_some() != (a == Element::B1) {
            return Err(Reject::Unsupported);
        }
        let [d_regs, a_regs, b_regs, c_regs] = operands else {
            return malformed("it has the wrong number of operands");
        };
        let shape = shape.units(a);
        let a = self.fragment(Role::A, shape, a, layout, a_regs, false)?;
        let b = self.fragment(Role::B, shape, b, layout, b_regs, false)?;
        let c = self.fragment(Role::Sum, shape, c, layout, c_regs, false)?;
        let d = self.fragment(Role::Sum, shape, d, layout, d_regs, true)?;
        Ok(Matrix::Multiply(Multiply {
            rows: shape.m,
            columns: shape.n,
            inner: shape.k,
            blocks: layout.blocks(),
            a,
            b,
            c,
            d,
            saturate: words.saturate,
            bits: words.bits,
            rounding: words.rounding.unwrap_or(Rounding::Nearest),
        }))
    }

    /// Returns the registers of a vector operand.
    fn vector(
        &mut self,
        operand: &Operand<'a>,
        ty: Type,
        dest: bool,
    ) -> Result<Box<[Reg]>, Reject> {
        let list = match operand {
            Operand::Vector(list) => list.as_slice(),
            single => std::slice::from_ref(single),
        };
        list.iter()
            .map(|operand| {
                if dest {
                    self.dest(operand)
                } else {
                    self.source(operand, ty)
                }
            })
            .collect()
    }

    /// Lowers a fragment and computes the positions of its elements in the matrix, row by row.
    fn fragment(
        &mut self,
        role: Role,
        shape: Shape,
        element: Element,
        layout: Layout,
        operand: &Operand<'a>,
        dest: bool,
    ) -> Result<Fragment, Reject> {
        let ty = if element == Element::F64 {
            Type::F64
        } else {
            Type::B32
        };
        let regs = self.vector(operand, ty, dest)?;
        let count = u32::try_from(regs.len()).unwrap_or(u32::MAX);
        let packed = element.packed();
        let (rows, columns) = role.extents(shape);
        let lanes = u32::try_from(LANES).unwrap_or(32);
        let held = count.saturating_mul(packed).saturating_mul(lanes);
        let total = rows * columns * layout.blocks();
        if !(1..=MAX_MATRIX_ELEMENTS).contains(&total) {
            return Err(Reject::Unsupported);
        }
        // Fragments of `wmma` may hold every element more than once.
        let fits = match layout {
            Layout::Wmma => (total..=4 * total).contains(&held) && held % total == 0,
            _ => held == total,
        };
        if !fits {
            return malformed("a fragment has the wrong number of registers for its shape");
        }
        let kind = FragmentKind {
            role,
            shape,
            element,
            layout,
            count,
        };
        let known = self.linker.positions.entry(kind);
        let positions = Arc::clone(known.or_insert_with(|| kind.positions()));
        Ok(Fragment {
            element,
            regs,
            positions,
        })
    }

    /// Lowers `wmma.load` and `wmma.store`.
    fn wmma_access(
        &mut self,
        m: &mut Modifiers<'a>,
        store: bool,
        regs: &Operand<'a>,
        address: &Operand<'a>,
        stride: Option<&Operand<'a>>,
    ) -> Result<Matrix, Reject> {
        let role = match m.first() {
            Some("a") if !store => Role::A,
            Some("b") if !store => Role::B,
            Some("c") if !store => Role::Sum,
            Some("d") if store => Role::Sum,
            _ => return Err(Reject::Unsupported),
        };
        let space = self.space(m);
        let words = Words::take(m)?;
        let (Some(shape), &[element], &[by_rows]) =
            (words.shape, &words.elements[..], &words.rows[..])
        else {
            return Err(Reject::Unsupported);
        };
        let shape = shape.units(element);
        let fragment = self.fragment(role, shape, element, Layout::Wmma, regs, !store)?;
        let (rows, columns) = role.extents(shape);
        let address = self.address(address)?;
        let place = Place {
            space: address.space.or(space).unwrap_or(AddressSpace::Generic),
            base: address.base,
            offset: address.offset,
        };
        let stride = match stride {
            Some(stride) => self.source(stride, Type::U32)?,
            // Strides count elements; a word of single bits has 32.
            None => {
                let extent = if by_rows { columns } else { rows };
                let unit = if element == Element::B1 { 32 } else { 1 };
                self.constant(u64::from(extent * unit))?
            }
        };
        Ok(Matrix::Access {
            store,
            fragment,
            columns,
            place,
            stride,
            by_rows,
        })
    }

    fn wmma_load(
        &mut self,
        m: &mut Modifiers<'a>,
        operands: &[Operand<'a>],
    ) -> Result<Matrix, Reject> {
        match operands {
            [regs, address] => self.wmma_access(m, false, regs, address, None),
            [regs, address, stride] => self.wmma_access(m, false, regs, address, Some(stride)),
            _ => malformed("it has the wrong number of operands"),
        }
    }

    fn wmma_store(
        &mut self,
        m: &mut Modifiers<'a>,
        operands: &[Operand<'a>],
    ) -> Result<Matrix, Reject> {
        match operands {
            [address, regs] => self.wmma_access(m, true, regs, address, None),
            [address, regs, stride] => self.wmma_access(m, true, regs, address, Some(stride)),
            _ => malformed("it has the wrong number of operands"),
        }
    }

    /// Lowers `ldmatrix` and `stmatrix`: one, two or four matrices of 8 by 8 elements of 16 bits.
    fn tiles(
        &mut self,
        load: bool,
        m: &mut Modifiers<'a>,
        operands: &[Operand<'a>],
    ) -> Result<Matrix, Reject> {
        if m.ty()? != Type::B16 || !m.take("m8n8") {
            return Err(Reject::Unsupported);
        }
        m.ignore(|part| matches!(part, "sync" | "aligned"));
        let transposed = m.take("trans");
        let space = self.space(m);
        let count = m.take_map(|part| match part {
            "x1" => Some(1),
            "x2" => Some(2),
            "x4" => Some(4),
            _ => None,
        });
        let (regs, address) = match operands {
            [regs, address] if load => (regs, address),
            [address, regs] => (regs, address),
            _ => return malformed("it has the wrong number of operands"),
        };
        let address = self.address(address)?;
        let place = Place {
            space: address.space.or(space).unwrap_or(AddressSpace::Generic),
            base: address.base,
            offset: address.offset,
        };
        let regs = self.vector(regs, Type::B32, load)?;
        if count != Some(regs.len()) {
            return malformed("the vector has the wrong length");
        }
        Ok(Matrix::Tiles(Tiles {
            load,
            regs,
            place,
            transposed,
        }))
    }
}
