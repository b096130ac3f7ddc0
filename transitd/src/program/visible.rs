//! What of the cluster's names the row of a VPC shows to its pods.

use super::row::InvalidRow;
use crate::dns::{ServiceName, Visible};

/// `services` and `hidden` are `namespace/name`.
pub fn visible(
    namespaces: Vec<String>,
    services: &[String],
    hidden: &[String],
) -> Result<Visible, InvalidRow> {
    let read = |names: &[String], field| {
        let names = names.iter().map(|name| match name.split_once('/') {
            Some((namespace, name)) => Ok(ServiceName::new(namespace, name)),
            None => Err(InvalidRow::Field {
                field,
                expected: "namespace/name",
            }),
        });
        names.collect::<Result<_, _>>()
    };
    Ok(Visible {
        namespaces: namespaces.into_iter().collect(),
        services: read(services, "visible_services")?,
        hidden: read(hidden, "hidden_services")?,
    })
}
