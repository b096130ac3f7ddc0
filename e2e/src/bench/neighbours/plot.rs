//! Bars of the answered share of each probe: alone, beside a harmless flood, beside the attack.

use super::report::Probed;
use crate::bench::plot::{BLUE, Bar, Bars, Entry, GREY, Group, ORANGE, Panel, Picture};

const KINDS: [(&str, crate::bench::plot::Colour); 3] = [
    ("alone", GREY),
    ("beside as many harmless packets", BLUE),
    ("beside the attack", ORANGE),
];

pub fn picture(probed: &[Probed]) -> Picture {
    let groups = probed.iter().map(|each| {
        let bars = each
            .shares()
            .into_iter()
            .zip(KINDS)
            .map(|(share, (_, colour))| Bar {
                value: share * 100.0,
                colour,
                mark: None,
                label: format!("{:.0}", share * 100.0),
            });
        Group {
            name: each.scene.to_owned(),
            note: each.probe.to_owned(),
            bars: bars.collect(),
        }
    });
    let bars = Bars {
        title: "Answered in time, percent: more is better".to_owned(),
        legend: KINDS.map(|(name, colour)| Entry::bar(name, colour)).into(),
        groups: groups.collect(),
        most: 110.0,
        one: Some(100.0),
        scale: |value| format!("{value:.0}"),
    };
    Picture {
        title: "Neighbours on one node".to_owned(),
        legend: Vec::new(),
        columns: 1,
        height: 320,
        panels: vec![Panel::Bars(bars)],
    }
}
