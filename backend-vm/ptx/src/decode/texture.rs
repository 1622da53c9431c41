//! Lowers accesses to textures and surfaces (PTX ISA 9.7.10 and 9.7.11).

use super::atomic::operation;
use super::function::Lowering;
use super::insn::{
    Access, AddressSpace, Base, Boundary, Detail, Geometry, Op, Order, Query, QueryArgs, Reg,
    SampleArgs, SurfaceAction, SurfaceArgs, TexelType,
};
use super::memory::advisory;
use super::modifiers::Modifiers;
use super::{Reject, malformed};
use crate::parse::ast::{Operand, Type};

/// Removes a geometry from the modifiers. Returns it and whether it is an array.
fn geometry(m: &mut Modifiers<'_>) -> Option<(Geometry, bool)> {
    m.take_map(|part| {
        Some(match part {
            "1d" => (Geometry::OneD, false),
            "2d" => (Geometry::TwoD, false),
            "3d" => (Geometry::ThreeD, false),
            "cube" => (Geometry::Cube, false),
            "a1d" => (Geometry::OneD, true),
            "a2d" => (Geometry::TwoD, true),
            "acube" => (Geometry::Cube, true),
            _ => return None,
        })
    })
}

/// Layer and coordinates of an access.
type Coordinates = (Option<Reg>, Box<[Reg]>);

/// Returns whether `sured.b` combines elements of a type by an operation (PTX ISA, "sured"; `ptxas` of CUDA 13 takes no
/// other combination).
fn is_reduction(name: &str, ty: Type) -> bool {
    match name {
        "add" => matches!(ty, Type::U32 | Type::S32 | Type::U64),
        "min" | "max" => matches!(ty, Type::U32 | Type::S32 | Type::U64 | Type::S64),
        "and" | "or" => ty == Type::B32,
        _ => false,
    }
}

impl<'a> Lowering<'a, '_, '_> {
    /// Lowers the instruction if it is one of this module's.
    pub(crate) fn texture(
        &mut self,
        name: &str,
        m: &mut Modifiers<'a>,
        operands: &[Operand<'a>],
    ) -> Result<bool, Reject> {
        match name {
            "tex" => self.sample(None, m, operands)?,
            "tld4" => {
                let channel = m.take_map(|part| "rgba".find(part).filter(|_| part.len() == 1));
                self.sample(Some(channel.ok_or(Reject::Unsupported)?), m, operands)?;
            }
            "suld" => self.surface(SurfaceAction::Load, m, operands)?,
            "sust" => self.surface(SurfaceAction::Store, m, operands)?,
            "sured" => self.reduction(m, operands)?,
            "txq" | "suq" => self.query(name == "suq", m, operands)?,
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Returns the row of an object's handle, which is loaded if it is in a variable or a
    /// parameter.
    fn handle(&mut self, operand: &Operand<'a>) -> Result<Reg, Reject> {
        let address = self.address(operand)?;
        if let (Base::Row(reg), 0) = (address.base, address.offset) {
            return Ok(reg);
        }
        let d = self.temporary()?;
        self.emit(Op::Load(Box::new(Access {
            space: address.space.unwrap_or(AddressSpace::Generic),
            base: address.base,
            offset: address.offset,
            size: 8,
            signed: false,
            regs: Box::new([d]),
            order: Order::default(),
        })));
        Ok(d)
    }

    fn rows(&mut self, operand: &Operand<'a>, ty: Type) -> Result<Box<[Reg]>, Reject> {
        let list = match operand {
            Operand::Vector(list) => list.as_slice(),
            single => std::slice::from_ref(single),
        };
        list.iter()
            .map(|operand| self.source(operand, ty))
            .collect()
    }

    /// Returns the handle, the layer and the coordinates of `[object, {layer, x, y, z}]`.
    fn object(
        &mut self,
        operand: &Operand<'a>,
        (geometry, layered): (Geometry, bool),
        ty: Type,
    ) -> Result<(Reg, Coordinates), Reject> {
        let Operand::List(list) = operand else {
            return malformed("an operand is not an object with coordinates");
        };
        // A third element is a sampler, which only the independent texturing mode has.
        let [object, coordinates] = &list[..] else {
            return Err(Reject::Unsupported);
        };
        let handle = self.handle(object)?;
        let mut rows = self.rows(coordinates, ty)?.into_vec();
        let wanted = geometry.coordinates();
        if rows.len() < wanted + usize::from(layered) {
            return malformed("coordinates are missing");
        }
        let layer = layered.then(|| rows.remove(0));
        // Elements that pad the vector to four have no meaning.
        rows.truncate(wanted);
        Ok((handle, (layer, rows.into())))
    }

    fn sample(
        &mut self,
        gather: Option<usize>,
        m: &mut Modifiers<'a>,
        operands: &[Operand<'a>],
    ) -> Result<(), Reject> {
        let coordinate_ty = m.ty()?;
        let result_ty = m.ty()?;
        let integers = match coordinate_ty {
            Type::S32 => true,
            Type::F32 => false,
            _ => return Err(Reject::Unsupported),
        };
        let (texel, elements) = match result_ty {
            Type::U32 | Type::S32 | Type::F32 => (TexelType::Word, 4),
            Type::F16 => (TexelType::Half, 4),
            Type::F16x2 => (TexelType::HalfPair, 2),
            _ => return Err(Reject::Unsupported),
        };
        if !m.take(if elements == 4 { "v4" } else { "v2" }) {
            return Err(Reject::Unsupported);
        }
        let shape = geometry(m).ok_or(Reject::Unsupported)?;
        let (level, grad) = (m.take("level"), m.take("grad"));
        m.take("base");
        let [dest, object, rest @ ..] = operands else {
            return malformed("it has the wrong number of operands");
        };
        let (handle, (layer, coordinates)) = self.object(object, shape, coordinate_ty)?;
        let detail = match rest {
            [] if !level && !grad => Detail::Base,
            [detail] if level => Detail::Level(self.source(detail, coordinate_ty)?),
            [x, y] if grad => {
                Detail::Gradients([self.rows(x, Type::F32)?, self.rows(y, Type::F32)?])
            }
            // Offsets and depth comparison are not supported.
            _ => return Err(Reject::Unsupported),
        };
        let (dest, resident) = match dest {
            Operand::List(pair) => match &pair[..] {
                [dest, resident] => (dest, Some(self.one_dest_pred(resident)?)),
                _ => return malformed("the destination is not a vector"),
            },
            dest => (dest, None),
        };
        let Operand::Vector(dests) = dest else {
            return malformed("the destination is not a vector");
        };
        if dests.len() != elements {
            return malformed("the vector has the wrong length");
        }
        let dests = dests
            .iter()
            .map(|dest| self.optional_dest(dest))
            .collect::<Result<_, _>>()?;
        self.emit(Op::Sample(Box::new(SampleArgs {
            geometry: shape.0,
            texel,
            integers,
            handle,
            layer,
            coordinates,
            detail,
            gather,
            dests,
            resident,
        })));
        Ok(())
    }

    fn boundary(m: &mut Modifiers<'a>) -> Boundary {
        m.take_map(|part| match part {
            "clamp" => Some(Boundary::Clamp),
            "zero" => Some(Boundary::Zero),
            "trap" => Some(Boundary::Trap),
            _ => None,
        })
        .unwrap_or(Boundary::Trap)
    }

    fn surface(
        &mut self,
        action: SurfaceAction,
        m: &mut Modifiers<'a>,
        operands: &[Operand<'a>],
    ) -> Result<(), Reject> {
        // The formatted forms convert and are not supported; these move bits.
        if !m.take("b") {
            return Err(Reject::Unsupported);
        }
        let boundary = Self::boundary(m);
        let ty = m.ty()?;
        let shape = geometry(m).filter(|(geometry, _)| *geometry != Geometry::Cube);
        let shape = shape.ok_or(Reject::Unsupported)?;
        let lanes = m.take_map(|part| match part {
            "v2" => Some(2),
            "v4" => Some(4),
            _ => None,
        });
        m.ignore(advisory);
        let size = match ty {
            Type::B8 | Type::B16 | Type::B32 | Type::B64 => ty.bytes(),
            _ => return Err(Reject::Unsupported),
        };
        let (object, value) = match operands {
            [value, object] if action == SurfaceAction::Load => (object, value),
            [object, value] => (object, value),
            _ => return malformed("it has the wrong number of operands"),
        };
        let (handle, (layer, coordinates)) = self.object(object, shape, Type::S32)?;
        let list = match value {
            Operand::Vector(list) => list.as_slice(),
            single => std::slice::from_ref(single),
        };
        let count = u32::try_from(list.len()).unwrap_or(u32::MAX);
        if list.len() != lanes.unwrap_or(1) || size.saturating_mul(count) > 16 {
            return malformed("the vector has the wrong length");
        }
        let regs = list
            .iter()
            .map(|element| {
                if action == SurfaceAction::Load {
                    self.dest(element)
                } else {
                    self.source(element, ty)
                }
            })
            .collect::<Result<_, _>>()?;
        self.emit(Op::Surface(Box::new(SurfaceArgs {
            action,
            geometry: shape.0,
            boundary,
            size,
            handle,
            layer,
            coordinates,
            regs,
        })));
        Ok(())
    }

    /// Lowers `sured.b`.
    fn reduction(&mut self, m: &mut Modifiers<'a>, operands: &[Operand<'a>]) -> Result<(), Reject> {
        if !m.take("b") {
            return Err(Reject::Unsupported);
        }
        let boundary = Self::boundary(m);
        let ty = m.ty()?;
        let shape =
            geometry(m).filter(|(geometry, layered)| *geometry != Geometry::Cube && !layered);
        let shape = shape.ok_or(Reject::Unsupported)?;
        let op = m
            .first()
            .filter(|name| is_reduction(name, ty))
            .and_then(|name| operation(name, ty))
            .ok_or(Reject::Unsupported)?;
        let [object, value] = operands else {
            return malformed("it has the wrong number of operands");
        };
        let (handle, (layer, coordinates)) = self.object(object, shape, Type::S32)?;
        let value = self.rows(value, ty)?;
        if value.len() != 1 {
            return malformed("the vector has the wrong length");
        }
        self.emit(Op::Surface(Box::new(SurfaceArgs {
            action: SurfaceAction::Reduce(op),
            geometry: shape.0,
            boundary,
            size: ty.bytes(),
            handle,
            layer,
            coordinates,
            regs: value,
        })));
        Ok(())
    }

    fn query(
        &mut self,
        surface: bool,
        m: &mut Modifiers<'a>,
        operands: &[Operand<'a>],
    ) -> Result<(), Reject> {
        m.ty()?;
        let at_level = m.take("level");
        let query = m.take_map(|part| match part {
            "width" => Some(Query::Width),
            "height" => Some(Query::Height),
            "depth" => Some(Query::Depth),
            "array_size" => Some(Query::Layers),
            "num_mipmap_levels" if !surface => Some(Query::Levels),
            "normalized_coords" if !surface => Some(Query::Normalized),
            _ => None,
        });
        let query = query.ok_or(Reject::Unsupported)?;
        let (dest, object, level) = match operands {
            [dest, object] if !at_level => (dest, object, None),
            [dest, object, level] if at_level => {
                (dest, object, Some(self.source(level, Type::U32)?))
            }
            _ => return malformed("it has the wrong number of operands"),
        };
        let handle = self.handle(object)?;
        let dest = self.dest(dest)?;
        self.emit(Op::Query(Box::new(QueryArgs {
            surface,
            query,
            dest,
            handle,
            level,
        })));
        Ok(())
    }
}
