//! Fills in the templates of rules, `thuban.nft` and `overlay_port.nft`.
//!
//! Pure. Invariant: a placeholder without a value stays in the text, and nft then refuses the whole text. So no rule
//! is left out by mistake.

use std::collections::BTreeMap;
use std::fmt::Display;

/// The values of the placeholders.
#[derive(Debug, Default)]
pub(super) struct Values(BTreeMap<&'static str, Vec<String>>);

impl Values {
    /// Sets one value.
    pub fn one(&mut self, name: &'static str, value: impl Display) {
        self.each(name, [value]);
    }

    /// Sets a mark or its mask, in hexadecimal.
    pub fn mark(&mut self, name: &'static str, mark: u32) {
        self.one(name, format_args!("{mark:#x}"));
    }

    /// Sets a line for each of these.
    pub fn each<T: Display>(&mut self, name: &'static str, values: impl IntoIterator<Item = T>) {
        let values = values.into_iter().map(|value| value.to_string());
        self.0.insert(name, values.collect());
    }

    /// Sets one line with all of these; no line if there are none.
    pub fn joined<T: Display>(&mut self, name: &'static str, values: impl IntoIterator<Item = T>) {
        let values: Vec<_> = values.into_iter().map(|value| value.to_string()).collect();
        self.each(name, (!values.is_empty()).then(|| values.join(", ")));
    }

    /// Sets whether the condition's lines stand.
    pub fn condition(&mut self, name: &'static str, holds: bool) {
        self.each(name, holds.then_some(""));
    }

    /// Returns the text for nft.
    pub fn fill(&self, template: &str) -> String {
        let mut text = String::new();
        for line in template.lines() {
            if line.is_empty() || line.trim_start().starts_with('#') {
                continue;
            }
            for filled in self.lines(line) {
                text.push_str(filled.trim_end_matches('\n'));
                text.push('\n');
            }
        }
        text
    }

    /// Returns the lines that a line, or its rest, turns into.
    fn lines(&self, line: &str) -> Vec<String> {
        let Some((before, rest)) = line.split_once("{{") else {
            return vec![line.to_owned()];
        };
        let Some((name, after)) = rest.split_once("}}") else {
            return vec![line.to_owned()];
        };
        let kept = [format!("{{{{{name}}}}}")];
        let values = self.0.get(name).map_or(&kept[..], Vec::as_slice);
        let ends = self.lines(after);
        let lines = values.iter().flat_map(|value| {
            let ends = ends.iter();
            ends.map(move |end| format!("{before}{value}{end}"))
        });
        lines.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_stands_once_for_each_value() {
        let mut values = Values::default();
        values.one("one", 1);
        values.each("many", ["a", "b"]);
        values.each("none", [""; 0]);
        values.joined("all", ["x", "y"]);
        let template = "# {{one}}\n  {{one}} {{many}}\n\n  {{none}} {{one}}\n    # said\nin { {{all}} }\n";
        assert_eq!(values.fill(template), "  1 a\n  1 b\nin { x, y }\n");
    }

    #[test]
    fn a_condition_keeps_or_drops_its_line() {
        let mut values = Values::default();
        values.condition("if_so", true);
        values.condition("if_not", false);
        assert_eq!(values.fill("{{if_so}}yes\n{{if_not}}no\n"), "yes\n");
    }

    #[test]
    fn a_placeholder_that_nobody_fills_in_stays() {
        assert_eq!(
            Values::default().fill("drop {{what}} now\n"),
            "drop {{what}} now\n"
        );
    }
}
