//! Plots of ratios: a bar for each row and way, from 1 to its ratio, on a logarithmic scale.

use plotters::backend::SVGBackend;
use plotters::drawing::{DrawingArea, DrawingAreaErrorKind, IntoDrawingArea};
use plotters::element::{PathElement, Rectangle, Text};
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{Color, IntoFont, RGBColor, ShapeStyle, TextStyle, WHITE};
use wormhole_figures::{Report, Row, digits};

/// Colours of the ways in their order. Each reads on white and on black.
pub const COLOURS: [RGBColor; 4] = [
    RGBColor(0x3b, 0x82, 0xc4),
    RGBColor(0xd9, 0x82, 0x2b),
    RGBColor(0x9b, 0x59, 0xb6),
    RGBColor(0x3c, 0x9d, 0x66),
];
const GRID: RGBColor = RGBColor(0xc8, 0xc8, 0xc8);
const ONE: RGBColor = RGBColor(0x80, 0x80, 0x80);

/// Colours where the reader's system is dark. A reader that does not know the query has black on white.
const STYLE: &str = r##"<style>
@media (prefers-color-scheme: dark) {
  rect[fill="#FFFFFF"] { fill: #0d1117; }
  text { fill: #e6edf3; }
  polyline[stroke="#C8C8C8"] { stroke: #30363d; }
}
</style>"##;

/// Sizes in pixels.
const WIDTH: i32 = 1000;
const LABELS: i32 = 500;
const MARGIN: i32 = 60;
const HEAD: i32 = 44;
const BAR: i32 = 12;
const GAP: i32 = 6;
/// The plotting crate writes 0.81 of it.
const TEXT: i32 = 14;

/// Numbers with a line in the grid.
const LINES: [f64; 15] = [
    0.001, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 1000.0,
];

type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;
type Drawn = Result<(), DrawingAreaErrorKind<std::io::Error>>;

/// Returns whether the report has something to be plotted.
pub fn has_ratios(report: &Report) -> bool {
    report.ways.iter().any(|way| report.has_ratio(way))
}

/// Returns the plot, as SVG; `None` if the report has no ratios.
pub fn plot(report: &Report) -> Option<String> {
    if !has_ratios(report) {
        return None;
    }
    let plot = Plot::of(report);
    let mut text = String::new();
    let size = (WIDTH.unsigned_abs(), plot.height().unsigned_abs());
    {
        let area = SVGBackend::with_string(&mut text, size).into_drawing_area();
        // Writing into a string cannot fail.
        plot.draw(&area).ok()?;
    }
    let end = text.find('>')? + 1;
    text.insert_str(end, &format!("\n{STYLE}"));
    Some(text)
}

struct Plot<'a> {
    report: &'a Report,
    /// Ways with ratios.
    ways: Vec<&'a String>,
    rows: Vec<&'a Row>,
    least: f64,
    most: f64,
}

impl<'a> Plot<'a> {
    fn of(report: &'a Report) -> Self {
        let has_ratio = |row: &&Row| row.ways.values().any(|figure| figure.ratio.is_some());
        let rows: Vec<&Row> = report.rows.iter().filter(has_ratio).collect();
        let ratios = || {
            let figures = rows.iter().flat_map(|row| row.ways.values());
            figures.filter_map(|figure| figure.ratio)
        };
        // Room beside the longest bars for their numbers, and at least half and double.
        let (least, most) = (ratios().fold(0.5, f64::min), ratios().fold(2.0, f64::max));
        Self {
            report,
            ways: report
                .ways
                .iter()
                .filter(|way| report.has_ratio(way))
                .collect(),
            least: least * 0.9,
            most: most * 1.1,
            rows,
        }
    }

    fn row_height(&self) -> i32 {
        BAR * i32::try_from(self.ways.len()).unwrap_or(1) + GAP
    }

    fn height(&self) -> i32 {
        HEAD + self.row_height() * i32::try_from(self.rows.len()).unwrap_or(0) + GAP
    }

    /// Returns the place of a ratio.
    fn x(&self, ratio: f64) -> i32 {
        let part = (ratio / self.least).ln() / (self.most / self.least).ln();
        #[expect(clippy::cast_possible_truncation, reason = "a place in the plot")]
        let offset = (part * f64::from(WIDTH - LABELS - MARGIN)).round() as i32;
        LABELS + offset
    }

    fn draw(&self, area: &Area<'_>) -> Drawn {
        area.fill(&WHITE)?;
        self.draw_head(area)?;
        for line in LINES
            .into_iter()
            .filter(|line| (self.least..self.most).contains(line))
        {
            let is_one = (line - 1.0).abs() < f64::EPSILON;
            let colour = if is_one { ONE } else { GRID };
            let ends = vec![(self.x(line), HEAD - 4), (self.x(line), self.height())];
            area.draw(&PathElement::new(ends, colour))?;
            let label = (self.x(line), HEAD - 10);
            area.draw(&Text::new(line.to_string(), label, text(HPos::Center)))?;
        }
        let mut y = HEAD + GAP;
        for row in &self.rows {
            self.draw_row(area, row, y)?;
            y += self.row_height();
        }
        area.present()
    }

    /// Draws the title and the legend.
    fn draw_head(&self, area: &Area<'_>) -> Drawn {
        let title = format!(
            "{}: ratio to {}",
            self.report.benchmark,
            self.report.references.join(" or ")
        );
        area.draw(&Text::new(title, (GAP, 12), text(HPos::Left)))?;
        let mut x = LABELS;
        for (way, fill) in self.ways.iter().zip(COLOURS.iter().cycle()) {
            area.draw(&Rectangle::new([(x, 7), (x + BAR, 7 + BAR)], filled(fill)))?;
            area.draw(&Text::new(
                (*way).clone(),
                (x + BAR + 4, 12),
                text(HPos::Left),
            ))?;
            x += (WIDTH - LABELS) / 4;
        }
        Ok(())
    }

    fn draw_row(&self, area: &Area<'_>, row: &Row, top: i32) -> Drawn {
        let middle = top + (self.row_height() - GAP) / 2;
        area.draw(&Text::new(
            row.title(),
            (LABELS - GAP, middle),
            text(HPos::Right),
        ))?;
        let mut y = top;
        for (way, fill) in self.ways.iter().zip(COLOURS.iter().cycle()) {
            if let Some(ratio) = row.ways.get(*way).and_then(|figure| figure.ratio) {
                let (one, end) = (self.x(1.0), self.x(ratio));
                let (left, right) = (one.min(end), one.max(end).max(one.min(end) + 1));
                area.draw(&Rectangle::new(
                    [(left, y + 1), (right, y + BAR - 1)],
                    filled(fill),
                ))?;
                let label = (right + 4, y + BAR / 2);
                area.draw(&Text::new(digits(ratio), label, text(HPos::Left)))?;
            }
            y += BAR;
        }
        Ok(())
    }
}

fn filled(colour: &RGBColor) -> ShapeStyle {
    colour.filled()
}

fn text(at: HPos) -> TextStyle<'static> {
    let style: TextStyle<'static> = ("sans-serif", TEXT).into_font().into();
    style.pos(Pos::new(at, VPos::Center))
}
