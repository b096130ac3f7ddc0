//! What lbaasctl prints.

use std::fmt::Write as _;

use comfy_table::presets::NOTHING;
use comfy_table::{ColumnConstraint, Table, Width};
use kube::ResourceExt;
use serde::Serialize;
use thuban_api::condition::find;
use thuban_api::{Condition, ConditionStatus, IpPool, Vip};

use super::CtlError;
use super::arguments::{Format, Output};
use crate::derived::{family_name, port_text};

const TITLES: [&str; 8] = [
    "NAME",
    "SERVICE",
    "PORTS",
    "ADDRESSES",
    "DNS NAME",
    "POOL",
    "NODES",
    "STATE",
];
/// The least width of the columns of a table that is printed row by row.
const COLUMN: u16 = 14;

/// Prints objects in the format that is asked for.
pub fn print(output: Output, objects: &impl Serialize, text: impl Fn() -> String) -> Result<(), CtlError> {
    match output.format {
        None => print!("{}", text()),
        Some(Format::Json) => println!("{}", serde_json::to_string_pretty(objects)?),
        Some(Format::Yaml) => print!("{}", serde_yaml_ng::to_string(objects)?),
    }
    Ok(())
}

/// Returns rows in columns.
pub fn table<R>(titles: &[&str], rows: impl IntoIterator<Item = R>) -> String
where
    R: IntoIterator<Item = String>,
{
    text(&columns(titles, rows))
}

fn columns<R>(titles: &[&str], rows: impl IntoIterator<Item = R>) -> Table
where
    R: IntoIterator<Item = String>,
{
    let mut table = Table::new();
    table.load_style(NOTHING);
    if !titles.is_empty() {
        table.set_header(titles);
    }
    table.add_rows(rows);
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    table
}

fn text(table: &Table) -> String {
    format!("{}\n", table.trim_fmt())
}

pub fn vips(vips: &[Vip], with_namespace: bool) -> String {
    if with_namespace {
        let titles = [&["NAMESPACE"], TITLES.as_slice()].concat();
        let rows = vips
            .iter()
            .map(|vip| [vec![vip.namespace().unwrap_or_default()], row(vip)].concat());
        table(&titles, rows)
    } else {
        table(&TITLES, vips.iter().map(row))
    }
}

/// Returns a row of a table that is printed row by row, or the titles.
pub fn watched(row: &[String]) -> String {
    let titles: &[&str] = if row.is_empty() { &TITLES } else { &[] };
    let rows = (!row.is_empty()).then(|| row.to_vec());
    let mut table = columns(titles, rows);
    for column in table.column_iter_mut() {
        column.set_constraint(ColumnConstraint::LowerBoundary(Width::Fixed(COLUMN)));
    }
    text(&table)
}

/// Returns the cells of a Vip.
pub fn row(vip: &Vip) -> Vec<String> {
    let status = vip.status.clone().unwrap_or_default();
    vec![
        vip.name_any(),
        vip.spec.service.clone(),
        ports(vip),
        status.addresses.join(","),
        status.dns_name.clone(),
        status.pool.clone(),
        status.nodes.to_string(),
        state(vip),
    ]
}

fn ports(vip: &Vip) -> String {
    if vip.spec.ports.is_empty() {
        return "all".to_owned();
    }
    vip.spec.ports.iter().map(port_text).collect::<Vec<_>>().join(",")
}

fn state(vip: &Vip) -> String {
    if vip.metadata.deletion_timestamp.is_some() {
        return "Deleting".to_owned();
    }
    let conditions = vip.status.as_ref().map(|status| status.conditions.as_slice());
    let ready = find(conditions.unwrap_or_default(), "Ready");
    ready.map_or_else(|| "Pending".to_owned(), |ready| ready.reason.clone())
}

/// Returns all that is known of a Vip.
pub fn details(vip: &Vip) -> String {
    let status = vip.status.clone().unwrap_or_default();
    let families = vip.spec.ip_families.iter().map(|family| family_name(*family));
    let fields = [
        ("Name", vip.name_any()),
        ("Namespace", vip.namespace().unwrap_or_default()),
        ("Service", vip.spec.service.clone()),
        ("Ports", ports(vip)),
        ("Families", families.collect::<Vec<_>>().join(",")),
        ("Mode", format!("{:?}", vip.spec.mode)),
        ("Profiles", vip.spec.profiles.join(",")),
        ("Pool", status.pool.clone()),
        ("Addresses", status.addresses.join(",")),
        ("DNS name", status.dns_name.clone()),
        ("Announced by", status.announced_by.join(",")),
        ("State", state(vip)),
    ];
    let fields = fields.map(|(field, value)| [format!("{field}:"), value]);
    let condition = |condition: &Condition| {
        [
            condition.kind.clone(),
            format!("{:?}", condition.status),
            condition.reason.clone(),
            condition.message.clone(),
        ]
    };
    let mut text = table(&[], fields);
    let titles = ["CONDITION", "STATUS", "REASON", "MESSAGE"];
    let _ = write!(
        text,
        "\n{}",
        table(&titles, status.conditions.iter().map(condition))
    );
    text
}

pub fn pools(pools: &[IpPool]) -> String {
    let titles = ["NAME", "CLASS", "CIDRS", "LEASED", "QUARANTINED", "FREE", "STATE"];
    let row = |pool: &IpPool| {
        let status = pool.status.clone().unwrap_or_default();
        let accepted = find(&status.conditions, "Accepted");
        let state = match accepted {
            Some(accepted) if accepted.status == ConditionStatus::True => "Accepted",
            Some(accepted) => &accepted.reason,
            None => "Pending",
        };
        [
            pool.name_any(),
            format!("{:?}", pool.spec.class).to_lowercase(),
            pool.spec.cidrs.join(","),
            status.leased.to_string(),
            status.quarantined.to_string(),
            status.free.to_string(),
            state.to_owned(),
        ]
    };
    table(&titles, pools.iter().map(row))
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use thuban_api::Vip;

    use super::{details, vips, watched};

    #[test]
    fn tables_say_where_a_vip_stands() {
        let vip: Vip = serde_json::from_value(json!({
            "apiVersion": "thuban.dev/v1alpha1", "kind": "Vip", "metadata": {"name": "shop", "namespace": "red"},
            "spec": {"service": "web", "ports": [{"port": 443}, {"port": 53, "protocol": "UDP"}]},
            "status": {"addresses": ["203.0.113.7"], "pool": "gold", "nodes": 2, "conditions": [
                {"type": "Ready", "status": "False", "reason": "NoNode", "message": "no node",
                    "lastTransitionTime": ""}]},
        }))
        .unwrap();
        let listed = vips(std::slice::from_ref(&vip), true);
        let cells: Vec<&str> = listed.lines().nth(1).unwrap().split_whitespace().collect();
        assert_eq!(
            cells,
            [
                "red",
                "shop",
                "web",
                "443/TCP,53/UDP",
                "203.0.113.7",
                "gold",
                "2",
                "NoNode"
            ]
        );
        assert!(!vips(std::slice::from_ref(&vip), false).contains("NAMESPACE"));
        let shown = details(&vip);
        assert!(shown.contains("IPv4") && shown.contains("no node"), "{shown}");
        let [titles, row] = [watched(&[]), watched(&super::row(&vip))];
        assert_eq!(titles.find("SERVICE"), row.find("web"), "{titles}{row}");
    }
}
