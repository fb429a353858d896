"""Alembic's environment: always on the connection that ablate.service.store.migrate hands over."""

from alembic import context

from ablate.service.store.tables import metadata

connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=metadata, transactional_ddl=True, render_as_batch=False)
context.run_migrations()
