//! Plots of benchmarks as SVG: a picture has panels, a panel has bars or curves. A benchmark gives the content; only
//! this module decides how it looks.

mod bars;
mod curves;

pub use bars::{Bar, Bars, Group};
pub use curves::{Axis, Curve, Curves, Goal};

use anyhow::{Context, Result};
use plotters::{
    coord::Shift,
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};

use super::float;

pub type Colour = RGBColor;

pub const BLUE: Colour = RGBColor(0x1f, 0x6f, 0x8b);
pub const LIGHT_BLUE: Colour = RGBColor(0x5a, 0xa9, 0xc4);
pub const NAVY: Colour = RGBColor(0x3d, 0x40, 0x5b);
pub const ORANGE: Colour = RGBColor(0xe0, 0x9f, 0x3e);
pub const SAND: Colour = RGBColor(0xf2, 0xcc, 0x8f);
pub const SLATE: Colour = RGBColor(0x8d, 0x99, 0xae);
pub const GREY: Colour = RGBColor(0xb8, 0xb8, 0xb8);
/// The colour of goals and marks.
pub const RED: Colour = RGBColor(0xc0, 0x39, 0x2b);

const FAINT: Colour = RGBColor(0x66, 0x66, 0x66);
const AXIS: Colour = RGBColor(0x88, 0x88, 0x88);
const MESH: Colour = RGBColor(0xe2, 0xe2, 0xe2);

const FAMILY: &str = "DejaVu Sans, Helvetica, Arial, sans-serif";
const WIDTH: u32 = 1180;
/// The left edge of titles and plots.
const LEFT: i32 = 60;

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

pub struct Picture {
    pub title: String,
    /// The legend of all panels.
    pub legend: Vec<Entry>,
    /// The number of panels side by side.
    pub columns: usize,
    /// Height of a panel in pixels.
    pub height: u32,
    pub panels: Vec<Panel>,
}

pub enum Panel {
    Bars(Bars),
    Curves(Curves),
}

/// The meaning of a colour.
pub struct Entry {
    pub name: String,
    pub colour: Colour,
    /// Whether the entry shows a mark or a line; otherwise it shows a bar.
    pub is_line: bool,
}

impl Entry {
    pub fn bar(name: impl Into<String>, colour: Colour) -> Self {
        Self {
            name: name.into(),
            colour,
            is_line: false,
        }
    }

    pub fn line(name: impl Into<String>, colour: Colour) -> Self {
        Self {
            is_line: true,
            ..Self::bar(name, colour)
        }
    }
}

pub fn svg(picture: &Picture) -> Result<String> {
    let mut text = String::new();
    draw(picture, &mut text).context("drawing a plot")?;
    Ok(text)
}

fn draw(picture: &Picture, text: &mut String) -> Result<()> {
    let columns = picture.columns.max(1);
    let rows = picture.panels.len().div_ceil(columns).max(1);
    let head = if picture.legend.is_empty() { 46 } else { 66 };
    let size = (WIDTH, head + picture.height * rows as u32);
    let root = SVGBackend::with_string(text, size).into_drawing_area();
    root.fill(&WHITE)?;
    let title = Words::new(17.0).bold();
    title.put(&root, &picture.title, (LEFT - 10, 28))?;
    legend(&root, &picture.legend, 40)?;
    let (_, body) = root.split_vertically(head);
    for (area, panel) in body.split_evenly((rows, columns)).iter().zip(&picture.panels) {
        match panel {
            Panel::Bars(bars) => bars::draw(area, bars)?,
            Panel::Curves(curves) => curves::draw(area, curves)?,
        }
    }
    root.present()?;
    Ok(())
}

/// Draws the title of a panel and its legend; returns the height of both.
fn head(area: &Area, title: &str, entries: &[Entry]) -> Result<i32> {
    Words::new(14.0).bold().put(area, title, (LEFT - 10, 20))?;
    legend(area, entries, 30)?;
    Ok(if entries.is_empty() { 38 } else { 58 })
}

/// Draws a row of colours and their names.
fn legend(area: &Area, entries: &[Entry], top: i32) -> Result<()> {
    let mut x = LEFT - 10;
    for entry in entries {
        let (from, to) = if entry.is_line {
            ((x, top + 4), (x + 14, top + 7))
        } else {
            ((x, top), (x + 11, top + 11))
        };
        area.draw(&Rectangle::new([from, to], entry.colour.filled()))?;
        let words = Words::new(11.0);
        words.put(area, &entry.name, (x + 18, top + 12))?;
        x += 36 + words.width(&entry.name);
    }
    Ok(())
}

/// The style of words.
#[derive(Clone, Copy)]
struct Words {
    size: f64,
    colour: Colour,
    anchor: HPos,
    style: FontStyle,
}

impl Words {
    /// Makes words of a size in pixels.
    const fn new(size: f64) -> Self {
        Self {
            size,
            colour: BLACK,
            anchor: HPos::Left,
            style: FontStyle::Normal,
        }
    }

    const fn bold(mut self) -> Self {
        self.style = FontStyle::Bold;
        self
    }

    const fn colour(mut self, colour: Colour) -> Self {
        self.colour = colour;
        self
    }

    const fn centred(mut self) -> Self {
        self.anchor = HPos::Center;
        self
    }

    fn text_style(self) -> TextStyle<'static> {
        // The SVG backend divides sizes by this.
        let font = (FAMILY, self.size * 1.24, self.style).into_font();
        font.color(&self.colour).pos(Pos::new(self.anchor, VPos::Bottom))
    }

    /// Returns the approximate width in pixels.
    fn width(self, words: &str) -> i32 {
        (self.size * 0.57 * float(words.chars().count() as u64)) as i32
    }

    /// Draws the words with white behind, so that no line crosses them.
    fn put_over(self, area: &Area, words: &str, (x, y): (i32, i32)) -> Result<()> {
        let (half, height) = (self.width(words) / 2, self.size as i32);
        let behind = [(x - half, y - height), (x + half, y - 2)];
        area.draw(&Rectangle::new(behind, WHITE.filled()))?;
        self.put(area, words, (x, y))
    }

    /// Draws the words above the place, in pixels of the area.
    fn put(self, area: &Area, words: &str, place: (i32, i32)) -> Result<()> {
        Ok(area.draw_text(words, &self.text_style(), place)?)
    }
}

/// Returns a number as an axis shows it.
pub fn rounded(value: f64) -> String {
    format!("{}", (value * 10.0).round() / 10.0)
}

/// Returns the style of an axis' numbers.
fn axis_style(colour: Colour) -> TextStyle<'static> {
    let font = (FAMILY, 11.0 * 1.24).into_font();
    font.color(&colour)
}
